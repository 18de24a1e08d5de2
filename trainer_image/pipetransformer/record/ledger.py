"""The ledger of committed samples: evidence that no sample was lost or repeated, whatever the layouts were.

Every worker of a pipeline writes the pipeline's line of a step, so that a death loses no evidence. For each step the
highest generation that committed it counts; lines of lower generations are redone steps and counted separately.
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
        """Note a pipeline's samples of a committed step (from 0), without padding.

        Note this worker's own pipeline first, then those of dead workers that may not have noted theirs.
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
        lost: lost samples that the ledgers here cover; None if they do not cover all samples and show no loss.
        repeated: as `lost`, for repeated samples.
        unaudited: samples that only ledgers in other folders cover.
        redone_steps: steps that a higher generation committed again, or that an earlier run made beyond this one's end.
    """

    first_step: int
    lost: int | None
    repeated: int | None
    unaudited: int
    redone_steps: int


def audit(run_dir: Path, order: EpochOrder, started_at: int, num_steps: int) -> Audit:
    """Compare the ledgers of a run with the order of its data. Needs 8 bytes of memory per committed sample id.

    Args:
        run_dir: folder of the record.
        order: the order of the data.
        started_at: the first step of the record, unless a ledger begins earlier.
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
    """A layout generation by the ledgers in this folder.

    Attributes:
        workers: number of its workers that wrote a ledger here.
        spans: first and last step that each pipeline's own workers noted.
    """

    stages: int
    pipelines: int
    workers: int = 0
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all its workers wrote here, so that a missing line is missing everywhere."""
        return self.workers >= self.stages * self.pipelines


class _Ledgers:
    """All lines of a folder, and the samples that they cover.

    Workers may have separate folders (an output that is a URL, torchrun on several machines), so a line that is not
    here need not be lost. If all workers of a generation wrote here, all its samples are covered. Otherwise each
    pipeline is covered from the first to the last line of its own workers. Lines that survivors note for dead workers
    do not extend this, because the dead workers' own lines are elsewhere.

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
            size = line.get("stages", 1), line.get("pipelines", 0)
            generation = self._generations.setdefault(number, _Generation(*size))
            if "pipelines" not in line:  # of an older image, whose audit took all ledgers to be in one folder
                generation.pipelines = max(generation.pipelines, pipeline + 1)
            if number not in own:  # a worker notes its own pipeline first
                own[number] = pipeline
                generation.workers += 1
            if pipeline == own[number]:
                first, last = generation.spans.get(pipeline, (step, step))
                generation.spans[pipeline] = min(first, step), max(last, step)

    def lines_of(self, step: int) -> dict[int, NDArray[np.int64]]:
        """Sample ids of each pipeline in the generation that counts."""
        generations = self.history.get(step)
        return generations[max(generations)] if generations else {}

    def covered(self, step: int) -> tuple[set[int], int]:
        """The pipelines whose samples of a step should be here, and the number of all."""
        number = self._committed_by(step)
        if number is None:
            return set(), 1
        generation = self._generations[number]
        if generation.whole:
            return set(range(generation.pipelines)), generation.pipelines
        inside = {pipeline for pipeline, (first, last) in generation.spans.items() if first <= step <= last}
        return inside | self.lines_of(step).keys(), generation.pipelines

    def _committed_by(self, step: int) -> int | None:
        """The generation that counts for a step. For a step without a line it is derived from the steps before and
        after, if no other generation can have been between them."""
        if generations := self.history.get(step):
            return max(generations)
        place = bisect(self._steps, step)
        around = [max(self.history[near]) for near in self._steps[max(0, place - 1) : place + 1]]
        if not around or (around[0] != around[-1] and not self._adjacent(around[0], around[-1])):
            return None
        return around[0]

    def _adjacent(self, before: int, after: int) -> bool:
        return after == before + 1 and all(self._generations[number].whole for number in (before, after))
