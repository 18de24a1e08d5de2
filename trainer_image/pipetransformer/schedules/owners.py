"""Which worker owns which span in a layout, and what runs where the layout cannot run the schedule of the spec.

All of it follows from a few numbers, so every worker, `pipetransformer plan` and the docs get the same answer.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pipetransformer_contract.spec import ScheduleName

from .actions import Schedule

#: Schedules of torch whose lists need the micro-batches in rounds of equal size.
_IN_ROUNDS = frozenset({ScheduleName.INTERLEAVED, ScheduleName.ZERO_BUBBLE})


@runtime_checkable
class OwnsSpans(Protocol):
    """A program's schedule that gives each worker several spans, and says which worker owns which."""

    @property
    def spans(self) -> int:
        """Spans of each worker (V)."""
        ...

    def owners(self, workers: int) -> tuple[int, ...]:
        """The worker of each span, spans in the order of the model.

        Raises:
            ScheduleError: the schedule cannot have this number of workers.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fitted:
    """What runs in a layout.

    Attributes:
        schedule: the schedule that runs.
        owners: stage of each span, spans in the order of the model.
        reason: why it is not the schedule that was asked for; empty if it is.
    """

    schedule: ScheduleName
    owners: tuple[int, ...]
    reason: str = ""


def fit(
    schedule: ScheduleName,
    stages: int,
    spans_per_worker: int,
    micro_batches: int,
    num_layers: int,
    own: Schedule | None = None,
) -> Fitted:
    """What runs in a layout where `schedule` is asked for: 1F1B if the layout cannot run it.

    Args:
        schedule: the schedule that is asked for.
        stages: workers of a pipeline (K).
        spans_per_worker: spans of each worker (V).
        micro_batches: micro-batches of a round (M).
        num_layers: layers of the model (L).
        own: the program's schedule, for `Script`. If it is `OwnsSpans`, it says who owns the spans.

    Raises:
        ScheduleError: `own` cannot have this number of workers.
    """
    if spans_per_worker == 1 and schedule not in _IN_ROUNDS:
        return Fitted(schedule, owners_of(schedule, stages, 1))
    if reason := _why_not(schedule, stages, spans_per_worker, micro_batches, num_layers):
        return one_each(stages, f"{schedule} {reason}")
    if schedule is ScheduleName.SCRIPT and isinstance(own, OwnsSpans):
        return Fitted(schedule, own.owners(stages))
    return Fitted(schedule, owners_of(schedule, stages, spans_per_worker))


def one_each(stages: int, reason: str) -> Fitted:
    """1F1B with one span a worker, because of `reason`."""
    return Fitted(ScheduleName.ONE_FORWARD_ONE_BACKWARD, tuple(range(stages)), reason)


def owners_of(schedule: ScheduleName, stages: int, spans_per_worker: int) -> tuple[int, ...]:
    """The stage of each span. Spans go round the stages; those of `ZeroBubbleV` go there and back, so that the first
    stage owns the first span and the last."""
    there = range(stages)
    if schedule is ScheduleName.ZERO_BUBBLE_V:
        return (*there, *reversed(there))
    return (*there,) * spans_per_worker


def _why_not(schedule: ScheduleName, stages: int, spans_per_worker: int, micro_batches: int, num_layers: int) -> str:
    """Why a layout cannot run the schedule, as words that follow its name; empty if it can."""
    if stages == 1:
        return "needs at least 2 stages"
    if num_layers < (spans := stages * spans_per_worker):
        return f"needs a layer for each of {spans} spans ({stages} stages of {spans_per_worker}), not {num_layers}"
    if schedule in _IN_ROUNDS and micro_batches % (rounds := max(1, micro_batches // stages)):
        return f"needs micro-batches in {rounds} equal rounds over {stages} stages, not {micro_batches}"
    return ""
