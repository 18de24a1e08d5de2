"""The ledger of committed samples: the evidence that none was lost or repeated, whatever changed size in between.

Every worker of a pipeline may write the pipeline's line of a step, so that one death loses no evidence. The history
that counts is, for each step, the highest generation that committed it; lines of lower ones are redone steps and
counted apart.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
    """Compare the ledgers of a run that committed steps 0..num_steps-1 with the order of its data. It needs 8 bytes a
    committed sample id."""
    history: dict[int, dict[int, dict[int, NDArray[np.int64]]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted((run_dir / "ledger").glob("*.jsonl")):
        for line in lines.read(path):
            ids = np.array(line["samples"], dtype=np.int64)
            history[line["step"]][line["layoutGeneration"]][line["pipeline"]] = ids
    lost = repeated = 0
    for _, steps in groupby(sorted({*history, *range(num_steps)}), order.epoch):
        balance = np.zeros(order.num_samples, dtype=np.int64)
        for step in steps:
            generations = history.get(step, {})
            for seen in generations[max(generations)].values() if generations else ():
                known = seen[(seen >= 0) & (seen < order.num_samples)]
                repeated += len(seen) - len(known)
                np.add.at(balance, known, 1)
            for expected in order.batch(step) if step < num_steps else ():
                np.subtract.at(balance, expected, 1)
        lost += int(-balance[balance < 0].sum())
        repeated += int(balance[balance > 0].sum())
    return Audit(lost, repeated, sum(len(generations) - 1 for generations in history.values()))
