"""Seconds of a slice of tokens as a function of its length and of the tokens before it, fitted to measurements."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel

from .slices import Seconds, StageTimes, equal_slices, in_tokens, plan_round

#: Chunks of a round for each stage, before costs are measured. A pipeline of K stages then waits at most a fifth of a
#: round.
_CHUNKS_PER_STAGE = 4


class SliceProbe(NamedTuple):
    """One measurement: `samples` samples, `length` tokens of each behind `context` tokens."""

    samples: int
    length: int
    context: int
    seconds: float


class SliceCost(BaseModel):
    """t(B, l, c) = fixed + B (token l + context c + pair l c + square l^2) seconds for B samples.

    The paper measures t(l, 0) and fits the rest to l, c and l c (TeraPipe, Li et al., 2021, section 3.3). Here l^2 is
    fitted, too, because a slice also attends to itself.
    """

    fixed: float = 0.0
    token: float = 0.0
    context: float = 0.0
    pair: float = 0.0
    square: float = 0.0

    def __add__(self, other: "SliceCost") -> "SliceCost":
        return SliceCost(**{name: value + getattr(other, name) for name, value in self})

    def seconds(self, samples: int, length: int, context: int) -> float:
        """Seconds of one slice; at least 0."""
        per_sample = self.token * length + self.context * context + self.pair * length * context
        return max(0.0, self.fixed + samples * (per_sample + self.square * length**2))

    def table(self, samples: int, grain: int, total: int) -> Seconds:
        """Seconds by length and context in grains; see `StageTimes`. The last grain of a sample may be smaller."""
        grains = -(-total // grain)
        table = np.zeros((grains + 1, grains + 1))
        for start in range(grains):
            for end in range(start + 1, grains + 1):
                length = min(total, end * grain) - start * grain
                table[end - start, start] = self.seconds(samples, length, start * grain)
        return table


#: What to measure of samples of that many quarters: (length, context). These tell all terms apart.
PROBED_QUARTERS = ((1, 0), (1, 3), (2, 2), (4, 0))


def fit(probes: Sequence[SliceProbe]) -> tuple[SliceCost, float]:
    """The cost with the least relative error whose terms are not negative, and the root of its mean square.

    Args:
        probes: for at least two numbers of samples, and `PROBED_QUARTERS`.
    """
    if not any(probe.seconds for probe in probes):
        return SliceCost(), 0.0
    b, length, context, seconds = (np.array(column, dtype=float) for column in zip(*probes, strict=True))
    features = np.stack([np.ones_like(b), b * length, b * context, b * length * context, b * length**2], axis=1)
    scale = 1 / np.maximum(seconds, 1e-12)
    weighted = features * scale[:, None]
    used = list(range(features.shape[1]))
    while True:
        found = np.zeros(features.shape[1])
        sizes = np.abs(weighted[:, used]).max(axis=0)  # tokens squared would dwarf the rest
        found[used] = np.linalg.lstsq(weighted[:, used] / sizes, np.ones(len(probes)), rcond=None)[0] / sizes
        worst = int(found.argmin())
        if found[worst] >= 0:
            break
        used.remove(worst)
    residual = float(np.sqrt(np.mean((weighted @ found - 1) ** 2)))
    return SliceCost(**dict(zip(SliceCost.model_fields, found.tolist(), strict=True))), residual


def stage_times(forward: SliceCost, backward: SliceCost, *, samples: int, grain: int, total: int) -> StageTimes:
    """The times of a stage for micro-batches of `samples` samples of `total` tokens."""
    return StageTimes(forward.table(samples, grain, total), backward.table(samples, grain, total))


class SliceCosts(BaseModel):
    """Measured costs of slices in all L + 2 units; the same numbers on every worker.

    Attributes:
        forward: of each unit.
        backward: of each unit; zero for units that were frozen at the measurement.
        residual: root of the mean square of the relative error, over all units that take time.
        boundary: frozen layers at the measurement.
    """

    forward: list[SliceCost]
    backward: list[SliceCost]
    residual: float = 0.0
    boundary: int = 0

    def stages(
        self, spans: Sequence[range], first_trained: int, *, samples: int, grain: int, total: int
    ) -> list[StageTimes]:
        """The times of each span for micro-batches of `samples` samples of `total` tokens.

        Args:
            spans: units of each, in the order of the model.
            first_trained: the first unit that trains.
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
    """The lengths of slices, in tokens, for which a round of equal micro-batches takes least.

    Before costs are measured they are equal, enough of them to keep all stages busy. One stage runs whole samples.

    Args:
        costs: measured costs; None before they are.
        spans: units of each stage.
        first_trained: the first unit that trains.
        samples: of a micro-batch.
        micro_batches: of a pipeline in a round.
        total: tokens of a sample.
        grain: tokens that all slices but the last are multiples of.
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
