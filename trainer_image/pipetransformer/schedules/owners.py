"""Says which worker owns which span in a layout, and which schedule runs if the layout cannot run the spec's.

The answer depends only on the arguments of `fit`, so all workers, `pipetransformer plan` and the docs get the same.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pipetransformer.errors import SpecError
from pipetransformer_contract.spec import ScheduleName

from .operations import Schedule, ScheduleError

#: Schedules of torch that need the micro-batches in equal rounds (`rounds_of`).
_IN_ROUNDS = frozenset({ScheduleName.INTERLEAVED, ScheduleName.ZERO_BUBBLE})


@runtime_checkable
class OwnsSpans(Protocol):
    """A schedule of the user's program that gives each worker several spans, and says which worker owns which span."""

    @property
    def spans(self) -> int:
        """Spans of each worker (V)."""
        ...

    def owners(self, workers: int) -> tuple[int, ...]:
        """The worker of each span, spans in the order of the model.

        Raises:
            ScheduleError: the schedule cannot run with this number of workers.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fitted:
    """The schedule that a layout runs.

    Attributes:
        schedule: the schedule that runs.
        owners: stage of each span, spans in the order of the model.
        reason: why the requested schedule does not run; empty if it does.
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
    script_schedule: Schedule | None = None,
) -> Fitted:
    """Choose what a layout runs: the requested schedule if the layout can run it, otherwise 1F1B.

    Args:
        schedule: the requested schedule.
        stages: workers of a pipeline (K).
        spans_per_worker: spans of each worker (V).
        micro_batches: micro-batches of a round (M).
        num_layers: layers of the model (L).
        script_schedule: the schedule of the user's program, for `Script`. If it is `OwnsSpans`, its `owners` are used.

    Raises:
        ScheduleError: `script_schedule` cannot run with this number of workers.
        SpecError: `script_schedule` fails, or gives spans to other workers than there are.
    """
    if spans_per_worker == 1 and schedule not in _IN_ROUNDS:
        return Fitted(schedule, owners_of(schedule, stages, 1))
    if reason := _why_not(schedule, stages, spans_per_worker, micro_batches, num_layers):
        return Fitted(ScheduleName.ONE_FORWARD_ONE_BACKWARD, tuple(range(stages)), f"{schedule} {reason}")
    if schedule is ScheduleName.SCRIPT and isinstance(script_schedule, OwnsSpans):
        owners = _owners_by(script_schedule, stages)
        if num_layers < len(owners):
            reason = (
                f"{schedule} needs a layer for each of the {len(owners)} spans of {script_schedule}, not {num_layers}"
            )
            return Fitted(ScheduleName.ONE_FORWARD_ONE_BACKWARD, tuple(range(stages)), reason)
        return Fitted(schedule, owners)
    return Fitted(schedule, owners_of(schedule, stages, spans_per_worker))


def owners_of(schedule: ScheduleName, stages: int, spans_per_worker: int) -> tuple[int, ...]:
    """The stage of each span. Stages take the spans in turns: 0, 1, ..., K - 1, and from 0 again. With `ZeroBubbleV`
    they go back, 0, ..., K - 1, K - 1, ..., 0: the first stage owns the first span and the last."""
    there = range(stages)
    if schedule is ScheduleName.ZERO_BUBBLE_V:
        return (*there, *reversed(there))
    return (*there,) * spans_per_worker


def rounds_of(micro_batches: int, workers: int) -> int:
    """Number of rounds in which torch's interleaved schedules run M micro-batches on K workers. M must be a multiple of
    it."""
    return max(1, micro_batches // workers)


def _owners_by(schedule: OwnsSpans, stages: int) -> tuple[int, ...]:
    """The owners that the user's schedule returns."""
    try:
        owners = tuple(int(worker) for worker in schedule.owners(stages))
    except ScheduleError:
        raise
    except Exception as error:
        raise SpecError("schedule", f"{schedule}: {type(error).__name__}: {error}") from error
    if set(owners) != set(range(stages)):
        raise SpecError(
            "schedule", f"{schedule} gives its spans to the workers {owners}, but there are {stages} workers"
        )
    return owners


def _why_not(schedule: ScheduleName, stages: int, spans_per_worker: int, micro_batches: int, num_layers: int) -> str:
    """Why a layout cannot run the schedule, in words that follow the schedule's name; empty if it can."""
    if stages == 1:
        return "needs at least 2 stages"
    if num_layers < (spans := stages * spans_per_worker):
        return f"needs a layer for each of {spans} spans ({stages} stages of {spans_per_worker}), not {num_layers}"
    if schedule in _IN_ROUNDS and micro_batches % (rounds := rounds_of(micro_batches, stages)):
        return f"needs micro-batches in {rounds} equal rounds over {stages} stages, not {micro_batches}"
    return ""
