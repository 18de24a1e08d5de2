"""The ledger: which samples each committed step used. It proves that no sample was lost or repeated in any layout.

All workers of a pipeline write the same line for a step, so the line survives the death of one of them. If several
generations committed a step, only the highest one counts. The others are counted as redone steps.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipetransformer.data import EpochOrder, shards_of
from pipetransformer.errors import storing

from . import lines


class Ledger:
    """One worker's `ledger/<worker>.jsonl`."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        self.path = run_dir / "ledger" / f"{worker}.jsonl"
        with storing(f"the run's record in {run_dir}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = lines.Appender(self.path)

    def append(
        self,
        *,
        step: int,
        epoch: int,
        layout_generation: int,
        stages: int,
        pipelines: int,
        pipeline: int,
        sample_ids: Sequence[int],
    ) -> None:
        """Append the ids of the samples that one pipeline used in a committed step (from 0), without padding.

        Callers append the line of this worker's own pipeline first. Then they append lines of pipelines whose workers
        died, because these workers may not have written their own.
        """
        self._lines.append(
            {
                "step": step,
                "epoch": epoch,
                "layoutGeneration": layout_generation,
                "stages": stages,
                "pipelines": pipelines,
                "pipeline": pipeline,
                "samples": list(sample_ids),
            },
        )


@dataclass(frozen=True)
class Audit:
    """The committed samples, compared with those that the steps should have used.

    Attributes:
        first_step: the first step (from 0) that the record covers; earlier steps belong to another record.
        lost: number of lost samples. None if these ledgers show no loss but do not cover all samples.
        repeated: number of repeated samples. None if these ledgers show none but do not cover all samples.
        unaudited: number of samples whose ledgers are not in this folder.
        redone_steps: steps that a higher generation committed again, or that an earlier run committed after this
            run's last step.
    """

    first_step: int
    lost: int | None
    repeated: int | None
    unaudited: int
    redone_steps: int


def audit(run_dir: Path, order: EpochOrder, started_at: int, num_steps: int) -> Audit:
    """Compare the ledgers of a run with the order of its data. Needs 8 bytes of memory for each committed sample id.

    Args:
        run_dir: folder of the record.
        order: the order of the training samples.
        started_at: the first step (from 0) of the record, unless a ledger has an earlier step.
        num_steps: committed steps of the run.
    """
    found = _Ledgers(run_dir)
    first = min([started_at, *found.history])
    lost = repeated = unaudited = 0
    for _, steps in groupby(range(first, num_steps), order.epoch):
        balance = np.zeros(order.num_samples, dtype=np.int64)
        for step in steps:
            for seen in found.lines_of(step).values():
                known = seen[(seen >= 0) & (seen < order.num_samples)]
                repeated += len(seen) - len(known)
                np.add.at(balance, known, 1)
            batch = order.batch(step)
            covered, width = found.covered(step)
            for pipeline in range(width):
                dealt = [i for shard in shards_of(pipeline, width, order.num_shards) for i in batch[shard]]
                if pipeline in covered:
                    np.subtract.at(balance, dealt, 1)
                else:
                    unaudited += len(dealt)
        lost += int(-balance[balance < 0].sum())
        repeated += int(balance[balance > 0].sum())
    redone = sum(len(generations) - (step < num_steps) for step, generations in found.history.items())
    whole = unaudited == 0
    return Audit(first, lost if lost or whole else None, repeated if repeated or whole else None, unaudited, redone)


@dataclass
class _Generation:
    """What the ledgers of one folder say about a layout generation.

    Attributes:
        stages: workers per pipeline (K).
        pipelines: number of pipelines (R).
        workers: number of workers of this generation whose ledger is in this folder.
        spans: by pipeline, the first and the last step that its own workers wrote.
    """

    stages: int
    pipelines: int
    workers: int = 0
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all workers of this generation wrote into this folder. Then a missing line was never written."""
        return self.workers >= self.stages * self.pipelines


class _Ledgers:
    """All lines of one folder, and which samples these lines should cover.

    Workers may have separate folders, such as with an output at a URL, or with torchrun on several machines. Then a
    line that is missing in this folder need not be lost. If all workers of a generation wrote into this folder, all
    samples of the generation are covered. Otherwise a pipeline is covered from the first to the last line of its own
    workers. Lines that other workers wrote for dead workers do not extend this range, because the dead workers' own
    lines are in another folder.

    Attributes:
        history: sample ids by step, generation and pipeline.
    """

    def __init__(self, run_dir: Path) -> None:
        self.history: dict[int, dict[int, dict[int, NDArray[np.int64]]]] = defaultdict(lambda: defaultdict(dict))
        self._generations: dict[int, _Generation] = {}
        for path in sorted((run_dir / "ledger").glob("*.jsonl")):
            self._read(path)
        self._steps = sorted(self.history)

    def _read(self, path: Path) -> None:
        own: dict[int, int] = {}
        for line in lines.read(path):
            step, number, pipeline = line["step"], line["layoutGeneration"], line["pipeline"]
            self.history[step][number][pipeline] = np.array(line["samples"], dtype=np.int64)
            generation = self._generations.setdefault(number, _Generation(line["stages"], line["pipelines"]))
            if number not in own:  # a worker notes its own pipeline first
                own[number] = pipeline
                generation.workers += 1
            if pipeline == own[number]:
                first, last = generation.spans.get(pipeline, (step, step))
                generation.spans[pipeline] = min(first, step), max(last, step)

    def lines_of(self, step: int) -> dict[int, NDArray[np.int64]]:
        """Sample ids by pipeline, of the highest generation that committed `step`; empty if no line has this step."""
        generations = self.history.get(step)
        return generations[max(generations)] if generations else {}

    def covered(self, step: int) -> tuple[set[int], int]:
        """The pipelines whose line for `step` should be in this folder, and the number of pipelines in that layout."""
        number = self._committed_by(step)
        if number is None:
            return set(), 1
        generation = self._generations[number]
        if generation.whole:
            return set(range(generation.pipelines)), generation.pipelines
        inside = {pipeline for pipeline, (first, last) in generation.spans.items() if first <= step <= last}
        return inside | self.lines_of(step).keys(), generation.pipelines

    def _committed_by(self, step: int) -> int | None:
        """The highest generation that committed `step`.

        A step without a line gets the generation of the steps before and after it. If these have different generations,
        they must be consecutive and complete in this folder; otherwise the generation is unknown (None).
        """
        if generations := self.history.get(step):
            return max(generations)
        place = bisect(self._steps, step)
        around = [max(self.history[near]) for near in self._steps[max(0, place - 1) : place + 1]]
        if not around or (around[0] != around[-1] and not self._adjacent(around[0], around[-1])):
            return None
        return around[0]

    def _adjacent(self, before: int, after: int) -> bool:
        return after == before + 1 and all(self._generations[number].whole for number in (before, after))
