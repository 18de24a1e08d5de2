"""The ledger of committed samples: the evidence that none was lost or repeated, whatever changed size in between.

Every worker of a pipeline may write the pipeline's line of a step, so that one death loses no evidence. The history
that counts is, for each step, the highest generation that committed it; lines of lower ones are redone steps and
counted apart.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data import EpochOrder
from ..errors import storing
from . import lines


class Ledger:
    """One worker's `ledger/<worker>.jsonl`."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        self.path = run_dir / "ledger" / f"{worker}.jsonl"
        with storing(f"the run's record in {run_dir}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = lines.Appender(self.path)

    def append(
        self, *, step: int, epoch: int, layout_generation: int, pipeline: int, sample_ids: Sequence[int]
    ) -> None:
        """Note, after its commit, what a step (from 0) trained in this worker's pipeline, padding left out."""
        self._lines.append(
            {
                "step": step,
                "epoch": epoch,
                "layoutGeneration": layout_generation,
                "pipeline": pipeline,
                "samples": list(sample_ids),
            },
        )


@dataclass(frozen=True)
class Audit:
    """Samples of the committed history against those that its steps should have seen."""

    lost: int
    repeated: int
    redone_steps: int


def audit(run_dir: Path, order: EpochOrder, num_steps: int) -> Audit:
    """Compare the ledgers of a run that committed steps 0..num_steps-1 with the order of its data."""
    history: dict[int, dict[int, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted((run_dir / "ledger").glob("*.jsonl")):
        for line in lines.read(path):
            history[line["step"]][line["layoutGeneration"]][line["pipeline"]] = line["samples"]
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    expected: dict[int, Counter[int]] = defaultdict(Counter)
    redone = 0
    for step, generations in history.items():
        redone += len(generations) - 1
        for samples in generations[max(generations)].values():
            seen[order.epoch(step)].update(samples)
    for step in range(num_steps):
        expected[order.epoch(step)].update(i for shard in order.batch(step) for i in shard)
    epochs = seen.keys() | expected.keys()
    return Audit(
        lost=sum((expected[epoch] - seen[epoch]).total() for epoch in epochs),
        repeated=sum((seen[epoch] - expected[epoch]).total() for epoch in epochs),
        redone_steps=redone,
    )
