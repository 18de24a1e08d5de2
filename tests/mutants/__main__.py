"""Run each mutant's tests on a copy of the tree that has it. Exits 1 if one survives, or cannot be decided."""

import argparse
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from .copy import Copy, ForkedTests, import_libraries
from .entries import ROOT, Mutant, all_mutants, faults

#: Longer than tests of several workers wait for each other: a message over gloo 60 s, a run 120 s.
_LIMIT_SECONDS = 180
#: All selections on code that has no mutant, in one process.
_UNCHANGED_LIMIT_SECONDS = 1200
_PASSED, _FAILED = 0, 1  # pytest's exit codes; the others say that tests did not run
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Trial:
    """A mutant in a copy, and its tests there."""

    number: int
    mutant: Mutant
    copy: Copy
    source: str
    tests: ForkedTests

    @classmethod
    def begin(cls, number: int, mutant: Mutant, copy: Copy) -> "Trial":
        source = (copy.folder / mutant.file).read_text()
        copy.write(mutant.file, mutant.apply(source))
        tests = ForkedTests(copy, mutant.killed_by, _LIMIT_SECONDS)
        tests.start()
        return cls(number, mutant, copy, source, tests)

    def end(self) -> str:
        """Change the file back. Returns why the mutant was not killed; empty if it was."""
        self.copy.write(self.mutant.file, self.source)
        if self.tests.late:
            return f"its tests did not end within {_LIMIT_SECONDS} s"
        if self.tests.code == _PASSED:
            return "its tests pass"
        return "" if self.tests.code == _FAILED else f"its tests did not run:\n{self.tests.output}"


def judge(mutants: list[Mutant], copies: list[Copy]) -> list[tuple[Mutant, str]]:
    """Try each mutant, one in each copy at a time, and print a line for each. Returns who survived, and why."""
    waiting, idle = deque(enumerate(mutants, start=1)), list(copies)
    running: list[Trial] = []
    survivors = []
    try:
        while waiting or running:
            while waiting and idle:
                running.append(Trial.begin(*waiting.popleft(), idle.pop()))
            time.sleep(_LOOK_SECONDS)
            for trial in [trial for trial in running if trial.tests.ended()]:
                running.remove(trial)
                idle.append(trial.copy)
                why, mutant = trial.end(), trial.mutant
                if why:
                    survivors.append((mutant, why))
                print(f"{trial.number:3} of {len(mutants)}  {'SURVIVED' if why else 'killed':8}", end="")
                print(f"  {trial.tests.seconds:5.1f} s  {mutant.file}: {mutant.breaks}", flush=True)
    finally:
        for trial in running:
            trial.tests.kill()
    return survivors


def passes(mutants: list[Mutant], copy: Copy) -> bool:
    """Whether the tests of all mutants pass on the code as it is."""
    names = sorted({test for mutant in mutants for test in mutant.killed_by})
    print(f"{len(names)} tests on the code as it is", flush=True)
    tests = ForkedTests(copy, names, _UNCHANGED_LIMIT_SECONDS)
    tests.start()
    while not tests.ended():
        time.sleep(_LOOK_SECONDS)
    if tests.code != _PASSED:
        print(f"{tests.output}\nThey have to pass before a mutant can be judged by them.")
    return tests.code == _PASSED


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("only", nargs="*", help="words: only mutants whose file or sentence has one of them")
    parser.add_argument("--lanes", type=int, default=2, help="mutants at a time (default: 2)")
    arguments = parser.parse_args()
    if wrong := faults(all_mutants(), ROOT):
        print("\n".join(wrong))
        return 1
    mutants = [
        mutant
        for mutant in all_mutants()
        if not mutant.equivalent
        and (not arguments.only or any(word in f"{mutant.file} {mutant.breaks}" for word in arguments.only))
    ]
    if not mutants:
        print(f"no mutant has any of these words: {' '.join(arguments.only)}")
        return 1
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Copy(Path(folder) / str(lane)) for lane in range(arguments.lanes)]
        if not passes(mutants, copies[0]):
            return 1
        survivors = judge(mutants, copies)
    for mutant, why in survivors:
        print(f"\nSURVIVED {mutant.file}: {mutant.breaks}\n  {' '.join(mutant.killed_by)}\n  {why}")
    print(f"killed {len(mutants) - len(survivors)} of {len(mutants)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
