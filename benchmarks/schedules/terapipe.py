"""TeraPipe's planned slices, against the best uniform count and against GPipe.

Attention over the whole sample costs 2.67 times the linear work, as with 32 times as many tokens as the width of a
layer. A stage is one unit. GPipe's micro-batches are whole samples, so with one sample nothing overlaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.virtual import UnitTimes
from pipetransformer.partition.slices import (
    MicroBatchSlices,
    StageTimes,
    equal_slices,
    in_tokens,
    plan_round,
    round_seconds,
)
from pipetransformer.schedules import GPipe, RoundShape, TeraPipe

from .part import Found
from .rig import measure
from .ways import Way

_TOKENS, _GRAIN = 256, 4
_ATTENTION_OVER_LINEAR = 2.67
#: Uniform counts that are run: the best by prediction, because runs of all would take minutes.
_COUNTS_RUN = 3
_PLANNED, _WHOLE = "planned slices", "GPipe"


@dataclass(frozen=True)
class Case:
    """A pipeline and its batch.

    Attributes:
        fixed_share: a slice's fixed cost over the forward of a whole sample.
        linear_seconds: the linear work of a sample's forward. It is longer where slices are many, so that Python's own
            time between two slices stays small.
    """

    workers: int
    batch: int
    fixed_share: float
    linear_seconds: float

    def unit(self) -> UnitTimes:
        attention = _ATTENTION_OVER_LINEAR * self.linear_seconds
        return UnitTimes(
            fixed=self.fixed_share * (self.linear_seconds + attention),
            per_token=self.linear_seconds / _TOKENS,
            per_pair=2 * attention / _TOKENS**2,
        )

    def way(self, name: str, slices: Sequence[int]) -> Way:
        """One unit a worker, whole samples cut into `slices`."""
        shape = RoundShape(tuple(range(self.workers)), self.batch * len(slices), slices=len(slices))
        schedule = TeraPipe() if len(slices) > 1 else GPipe()
        cut = tuple(range(worker, worker + 1) for worker in range(self.workers))
        return Way(name, (self.unit(),) * self.workers, cut, schedule, shape, slices=tuple(slices))

    def times(self) -> dict[int, list[StageTimes]]:
        """Seconds of slices in grains, for micro-batches of one sample. The first stage computes no input gradient."""
        grains = _TOKENS // _GRAIN
        unit = self.unit()
        forward = np.array(
            [
                [unit.forward(1, length * _GRAIN, context * _GRAIN) for context in range(grains + 1)]
                for length in range(grains + 1)
            ]
        )
        return {1: [StageTimes(forward, (2.0 if stage else 1.0) * forward) for stage in range(self.workers)]}


#: Cases, with the keys of planned over uniform slices and of planned slices over GPipe.
CASES = (
    (Case(4, 2, 0.04, 0.022), "terapipe_over_uniform_k4", ""),
    (Case(8, 2, 0.04, 0.022), "terapipe_over_uniform_k8", "terapipe_over_gpipe_batch2"),
    (Case(8, 1, 0.04, 0.030), "", "terapipe_over_gpipe_batch1"),
    (Case(16, 1, 0.03, 0.040), "", "terapipe_over_gpipe_k16"),
)


def run(pairs: int) -> Found:
    """K = 4 and 8 with a batch of 2, K = 8 and 16 with a batch of 1."""
    figures: dict[str, float] = {}
    ways = {}
    for case, uniform, whole in CASES:
        planned, counts = planned_way(case), uniform_ways(case) if uniform else []
        compared = [planned, *counts, *([whole_way(case)] if whole else [])]
        measured = measure(compared, pairs, rounds=1)
        if uniform:
            figures[uniform] = measured.low(measured.best([way.name for way in counts]), _PLANNED)
        if whole:
            figures[whole] = measured.low(_WHOLE, _PLANNED)
        ways[f"K={case.workers}, batch {case.batch}"] = measured.table(
            {way.name: way.declared_seconds for way in compared}
        )
    return Found(figures, ways)


def planned_way(case: Case) -> Way:
    """The planner's slices. All micro-batches have one sample, so all have the same slices or nearly so."""
    plan = plan_round(case.times(), case.batch)
    return case.way(_PLANNED, in_tokens(plan.micro_batches[0].lengths, _GRAIN, _TOKENS))


def whole_way(case: Case) -> Way:
    """GPipe over whole samples."""
    return case.way(_WHOLE, (_TOKENS,))


def uniform_ways(case: Case) -> list[Way]:
    """The uniform counts that should be best."""
    grains = _TOKENS // _GRAIN
    times = case.times()

    def seconds(count: int) -> float:
        return round_seconds(times, [MicroBatchSlices(1, equal_slices(grains, count))] * case.batch)

    best = sorted(range(2, grains + 1), key=seconds)[:_COUNTS_RUN]
    return [case.way(f"{count} equal slices", equal_slices(_TOKENS, count)) for count in sorted(best)]
