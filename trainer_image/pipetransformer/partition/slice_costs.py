"""Predicts the seconds of a slice of tokens from its length and the number of tokens before it, by a fitted formula."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel

from .slices import Seconds, StageTimes, equal_slices, in_tokens, plan_round

#: A round has this many chunks for each stage, before costs are measured. Stages then wait at most a fifth of a round.
_CHUNKS_PER_STAGE = 4


class SliceProbe(NamedTuple):
    """One measurement: the seconds of a slice of `length` tokens after `context` tokens, for `samples` samples."""

    samples: int
    length: int
    context: int
    seconds: float


class SliceCost(BaseModel):
    """Seconds of a slice of l tokens after c tokens, for B samples:

    t(B, l, c) = fixed + B (token l + context c + pair l c + square l^2).

    The paper measures t(l, 0) and fits the rest to l, c and l c (TeraPipe, Li et al., 2021, section 3.3). Here l^2 is
    fitted too, because a slice also attends to itself.
    """

    fixed: float = 0.0
    token: float = 0.0
    context: float = 0.0
    pair: float = 0.0
    square: float = 0.0

    def __add__(self, other: "SliceCost") -> "SliceCost":
        return SliceCost(**{name: value + getattr(other, name) for name, value in self})

    def seconds(self, samples: int, length: int, context: int) -> float:
        """Seconds of one slice.

        Args:
            samples: number of samples in the micro-batch.
            length: tokens of the slice.
            context: tokens of each sample before the slice.
        """
        per_sample = self.token * length + self.context * context + self.pair * length * context
        return self.fixed + samples * (per_sample + self.square * length**2)

    def table(self, samples: int, grain: int, total: int) -> Seconds:
        """The seconds of all slices of a sample, in the form of `StageTimes`.

        Args:
            samples: number of samples.
            grain: tokens of a grain. The last grain of a sample may be smaller.
            total: tokens of a sample.
        """
        grains = -(-total // grain)
        table = np.zeros((grains + 1, grains + 1))
        for start in range(grains):
            for end in range(start + 1, grains + 1):
                length = min(total, end * grain) - start * grain
                table[end - start, start] = self.seconds(samples, length, start * grain)
        return table


#: The (length, context) to measure, in quarters of a sample. These four tell all terms of `SliceCost` apart.
PROBED_QUARTERS = ((1, 0), (1, 3), (2, 2), (4, 0))


def fit(probes: Sequence[SliceProbe]) -> SliceCost:
    """Fit the terms of a cost to measurements: the least relative error with no negative term.

    Args:
        probes: measurements of all `PROBED_QUARTERS`, with at least two numbers of samples.
    """
    if not any(probe.seconds for probe in probes):
        return SliceCost()
    b, length, context, seconds = (np.array(column, dtype=float) for column in zip(*probes, strict=True))
    features = np.stack([np.ones_like(b), b * length, b * context, b * length * context, b * length**2], axis=1)
    scale = 1 / np.maximum(seconds, 1e-12)
    weighted = features * scale[:, None]
    used = list(range(features.shape[1]))
    while True:
        found = np.zeros(features.shape[1])
        sizes = np.abs(weighted[:, used]).max(axis=0)  # without scaling, tokens squared would dwarf the rest
        found[used] = np.linalg.lstsq(weighted[:, used] / sizes, np.ones(len(probes)), rcond=None)[0] / sizes
        worst = int(found.argmin())
        if found[worst] >= 0:
            return SliceCost(**dict(zip(SliceCost.model_fields, found.tolist(), strict=True)))
        used.remove(worst)


def stage_times(forward: SliceCost, backward: SliceCost, *, samples: int, grain: int, total: int) -> StageTimes:
    """The times of a stage for micro-batches of `samples` samples of `total` tokens."""
    return StageTimes(forward.table(samples, grain, total), backward.table(samples, grain, total))


class SliceCosts(BaseModel):
    """Measured costs of slices in all units: embedding, layers and head. All workers have the same numbers.

    Attributes:
        forward: cost of each unit's forward.
        backward: cost of each unit's backward; zero for units that were frozen at the measurement.
        boundary: number of frozen layers at the measurement.
    """

    forward: list[SliceCost]
    backward: list[SliceCost]
    boundary: int = 0

    def stages(
        self, spans: Sequence[range], first_trained: int, *, samples: int, grain: int, total: int
    ) -> list[StageTimes]:
        """The times of each span for micro-batches of `samples` samples of `total` tokens.

        Args:
            spans: units of each span, in the order of the model.
            first_trained: the first unit that trains.
            samples: samples of a micro-batch.
            grain: tokens of a grain.
            total: tokens of a sample.
        """
        nothing = SliceCost()
        return [
            stage_times(
                sum((self.forward[unit] for unit in span), start=nothing),
                sum((self.backward[unit] for unit in span if unit >= first_trained), start=nothing),
                samples=samples,
                grain=grain,
                total=total,
            )
            for span in spans
        ]


def choose_slices(
    costs: SliceCosts | None,
    spans: Sequence[range],
    first_trained: int,
    *,
    samples: int,
    micro_batches: int,
    total: int,
    grain: int,
) -> tuple[int, ...]:
    """The lengths of slices in tokens with which a round of equal micro-batches is fastest.

    Before costs are measured, all slices are equal, and there are enough to keep all stages busy. A single stage runs
    whole samples.

    Args:
        costs: measured costs; None before the measurement.
        spans: units of each stage.
        first_trained: the first unit that trains.
        samples: number of samples in a micro-batch.
        micro_batches: number of micro-batches of a pipeline in a round.
        total: tokens of a sample.
        grain: tokens of a grain; the length of each slice except the last is a multiple of it.
    """
    if len(spans) == 1:
        return (total,)
    grains = -(-total // grain)
    if costs is None:
        count = min(grains, -(-_CHUNKS_PER_STAGE * len(spans) // micro_batches))
        return in_tokens(equal_slices(grains, count), grain, total)
    stages = costs.stages(spans, first_trained, samples=samples, grain=grain, total=total)
    plan = plan_round({samples: stages}, samples * micro_batches)
    return in_tokens(plan.micro_batches[0].lengths, grain, total)
