"""Proves from a run's ledgers alone that no sample was lost or repeated. Imports nothing of ours, so that it shares
no mistake.

`python ledger_checker.py RUN_DIR --samples N --epochs E` reads `RUN_DIR/ledger/*.jsonl`, whose lines are
{"step", "epoch", "layoutGeneration", "pipeline", "samples"}. Of each step only the highest layout generation belongs
to the committed history; what lower ones had committed of it is redone work and counted apart. Exits 1 when a sample of
0..N-1 is missing from an epoch of 0..E-1, or is in it twice, or does not exist.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

#: (step, generation, pipeline)
Place = tuple[int, int, int]


@dataclass
class Findings:
    """What the checker found. `problems` are sentences; the counts are of samples (`redone`: of steps)."""

    lost: int = 0
    repeated: int = 0
    redone: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.repeated or self.problems)


def check(run_dir: Path, samples: int, epochs: int, *, goes_on: bool = False) -> Findings:
    """Check a run directory; of a run that `goes_on`, later epochs are left out.

    Several workers of a pipeline may note the same line; they must agree. One worker that notes a line twice
    committed it twice, and that counts as repeated.
    """
    findings = Findings()
    claims: dict[Place, list[tuple[str, int, list[int]]]] = defaultdict(list)
    for path in sorted((run_dir / "ledger").glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                findings.problems.append(f"{path.name}: torn line {text[:60]!r}")
                continue
            if goes_on and line["epoch"] >= epochs:
                continue
            place = (line["step"], line["layoutGeneration"], line["pipeline"])
            claims[place].append((path.name, line["epoch"], line["samples"]))
    if not claims:
        findings.problems.append(f"no ledger in {run_dir}")

    newest: dict[int, int] = {}
    for step, generation, _ in claims:
        newest[step] = max(generation, newest.get(step, generation))
    findings.redone = len({(step, generation) for step, generation, _ in claims if generation < newest[step]})

    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for (step, generation, pipeline), lines in sorted(claims.items()):
        if generation < newest[step]:
            continue
        if any(line[1:] != lines[0][1:] for line in lines):
            findings.problems.append(f"step {step}, generation {generation}: workers of pipeline {pipeline} disagree")
        times = max(Counter(worker for worker, _, _ in lines).values())
        for sample in lines[0][2]:
            seen[lines[0][1]][sample] += times

    if missing := sorted(set(range(max(newest, default=-1) + 1)) - newest.keys()):
        findings.problems.append(f"steps that no worker committed: {missing[:10]}")
    expected = Counter(range(samples))
    for epoch in sorted(seen.keys() | set(range(epochs))):
        wanted = expected if epoch < epochs else Counter[int]()
        findings.lost += (wanted - seen[epoch]).total()
        findings.repeated += (seen[epoch] - wanted).total()
    return findings


def main(arguments: list[str] | None = None) -> int:
    """Print the counts and every problem; 0 when the ledger is clean, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--samples", type=int, required=True, help="samples of the training split")
    parser.add_argument("--epochs", type=int, required=True, help="epochs that the run should have trained")
    options = parser.parse_args(arguments)
    findings = check(options.run_dir, options.samples, options.epochs)
    print(f"lost {findings.lost}, repeated {findings.repeated}, redone steps {findings.redone}")
    for problem in findings.problems:
        print(problem)
    return 0 if findings.clean else 1


if __name__ == "__main__":
    sys.exit(main())
