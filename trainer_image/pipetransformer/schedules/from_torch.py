"""Reads the order of torch's schedule classes as our lists. It needs no process group and no model.

We use only the order. torch's own runtime loses gradients if layers are frozen and a backward has two halves (2.13).
Only this module imports `torch.distributed.pipelining`. `_made` and `_translated` read parts of it that are not
public; `test_from_torch.py` fails if torch removes these.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from pipetransformer_contract.spec import ScheduleName
from pipetransformer_contract.words import counted

from .flushed import OneForwardOneBackward
from .operations import Action, ActionKind, RoundShape, ScheduleError
from .owners import owners_of, rounds_of

_KINDS = {
    "F": ActionKind.FORWARD,
    "B": ActionKind.BACKWARD,
    "I": ActionKind.INPUT_GRADIENT,
    "W": ActionKind.WEIGHT_GRADIENT,
}
_OF_ITS_RUNTIME = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
_OVERLAPPED = "OVERLAP_F_B"  # a forward and a backward that torch's runtime may overlap
_TWO_SPANS = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
_IN_ROUNDS = (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)

_Lists = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, slots=True)
class FromTorch:
    """The order of a schedule class of `torch.distributed.pipelining`, or of a class derived from one.

    Attributes:
        schedule: the class; its objects have a `pipeline_order`.
        spans: spans of each worker (V).

    Raises:
        ScheduleError: the class has no order that can be read, or cannot give each worker this number of spans.
    """

    schedule: type
    spans: int = 1

    def __post_init__(self) -> None:
        known = (PipelineScheduleSingle, PipelineScheduleMulti)
        if not isinstance(self.schedule, type) or not issubclass(self.schedule, known):
            raise ScheduleError(f"{self.schedule!r} is not a schedule class of torch.distributed.pipelining")
        needed = 2 if issubclass(self.schedule, _TWO_SPANS) else None
        if issubclass(self.schedule, PipelineScheduleSingle):
            needed = 1
            if _depth(self.schedule, "_step_microbatches") < _depth(self.schedule, "_get_pipeline_order"):
                raise ScheduleError(_no_order(self.schedule))
        if self.spans < 1 or needed not in (None, self.spans):
            wanted = "at least 1 span" if needed is None else counted(needed, "span")
            raise ScheduleError(f"{self.name} needs {wanted} a worker, not {self.spans}")

    @property
    def name(self) -> str:
        """The name of torch's class, without its prefix `Schedule`."""
        return self.schedule.__name__.removeprefix("Schedule")

    def owners(self, workers: int) -> tuple[int, ...]:
        """The worker of each span, spans in the order of the model.

        Raises:
            ScheduleError: the class cannot have this number of workers.
        """
        lists = _lists(self.schedule, self.spans, workers, 2 * workers * self.spans)  # chunks that all classes can run
        owner = {action.span: worker for worker, actions in enumerate(lists) for action in actions}
        return tuple(owner.get(span, -1) for span in range(workers * self.spans))

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        """The class's order, as `Schedule.actions` returns it."""
        if shape.slices > 1:
            raise ScheduleError(f"{self.name} has no order for slices of tokens")
        owners = self.owners(shape.workers)
        if shape.owners != owners:
            raise ScheduleError(f"{self.name} needs the spans on the workers {owners}, not {shape.owners}")
        made = _lists(self.schedule, self.spans, shape.workers, self._runnable(shape.workers, shape.chunks))
        # Chunks do not wait for each other, so the order is still right without some of them.
        return [
            [kept for action in mine if action.chunk < shape.chunks for kept in _without_frozen(action, shape)]
            for mine in made
        ]

    def _runnable(self, workers: int, chunks: int) -> int:
        """The smallest number of chunks that the class can run and that is at least `chunks`."""
        if issubclass(self.schedule, ScheduleDualPipeV):
            return max(chunks, workers * self.spans)
        if issubclass(self.schedule, _IN_ROUNDS):
            while chunks % rounds_of(chunks, workers):
                chunks += 1
        return chunks


def has_several_spans(schedule: type) -> bool:
    """Whether this class of torch can give a worker more than one span."""
    return issubclass(schedule, PipelineScheduleMulti)


@lru_cache(maxsize=64)
def _lists(schedule: type, spans: int, workers: int, chunks: int) -> _Lists:
    """The order of a class of torch as actions of each worker, for a round in which all spans train.

    Raises:
        ScheduleError: the class cannot run this round.
    """
    if getattr(schedule, "_get_pipeline_order", None) is Schedule1F1B._get_pipeline_order:
        # In torch 2.13 this order lets the last worker begin with the second chunk. What torch itself runs does not.
        return tuple(map(tuple, OneForwardOneBackward().actions(RoundShape(tuple(range(workers)), chunks))))
    order = _made(schedule, spans, workers, chunks).pipeline_order
    if not order:
        raise ScheduleError(_no_order(schedule))
    return tuple(tuple(_translated(order.get(worker, ()))) for worker in range(workers))


def _made(schedule: Any, spans: int, workers: int, chunks: int) -> Any:
    """An object of the class, as the first worker would make it, but without torch's messages (adding them is slow)."""
    stages = [_StandIn(number * workers, workers * spans, workers) for number in range(spans)]
    no_messages = type(schedule.__name__, (schedule,), {"_prepare_schedule_with_comms": lambda *_: None})
    try:
        return no_messages(stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages, chunks)
    except Exception as error:
        raise ScheduleError(f"{schedule.__name__} cannot run {chunks} chunks on {workers} workers: {error}") from error


def _depth(schedule: type, method: str) -> int:
    """How many steps up the class hierarchy from `schedule` the class is that defines `method`; 0 for `schedule`."""
    return next(depth for depth, cls in enumerate(schedule.__mro__) if method in vars(cls) or cls is object)


def _no_order(schedule: type) -> str:
    return (
        f"{schedule.__name__} has no pipeline_order of its own. A class that only overrides _step_microbatches cannot "
        "be checked before it runs: override _get_pipeline_order, or pass an object with actions(shape)"
    )


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Interleaved 1F1B (Narayanan et al., 2021, section 2.2): each worker owns several spans. Workers are idle for
    less time than in 1F1B, but send more messages. Worker k of K owns the spans k, k + K and so on.

    Attributes:
        spans: spans of each worker (V).
    """

    spans: int = 2

    def owners(self, workers: int) -> tuple[int, ...]:
        """The worker of each span, spans in the order of the model."""
        return owners_of(ScheduleName.INTERLEAVED, workers, self.spans)

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        """See `Schedule.actions`."""
        return FromTorch(ScheduleInterleaved1F1B, self.spans).actions(shape)


@dataclass(frozen=True, slots=True)
class ZeroBubble:
    """Interleaved 1F1B with each backward in two halves (ZB-H1; Qi et al., 2024, section 3). A worker computes the
    gradients of weights while it would otherwise wait.

    Attributes:
        spans: spans of each worker (V).
    """

    spans: int = 2

    def owners(self, workers: int) -> tuple[int, ...]:
        """The worker of each span, spans in the order of the model."""
        return owners_of(ScheduleName.ZERO_BUBBLE, workers, self.spans)

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        """See `Schedule.actions`."""
        return FromTorch(ScheduleInterleavedZeroBubble, self.spans).actions(shape)


@dataclass(frozen=True, slots=True)
class ZeroBubbleV:
    """Two spans a worker, assigned in a V, and each backward in two halves (ZB-V; Qi et al., 2024, section 6).

    The first worker owns the first and the last span. No worker keeps more activations than the first one of 1F1B:
    up to twice as many chunks, but each in a span of half the size.
    """

    def owners(self, workers: int) -> tuple[int, ...]:
        """The worker of each span, spans in the order of the model."""
        return owners_of(ScheduleName.ZERO_BUBBLE_V, workers, 2)

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        """See `Schedule.actions`."""
        return FromTorch(ScheduleZBVZeroBubble, 2).actions(shape)


@dataclass(slots=True)
class _StandIn:
    """Takes the place of a `PipelineStage`: has the attributes that torch's classes read to make their order."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    stage_index_to_group_rank: dict[int, int] | None = None

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


def _translated(actions: Iterable[Any]) -> Iterator[Action]:
    """torch's actions as ours. A None in torch's list is an idle turn of the worker, and is left out."""
    for action in actions:
        name = None if action is None else action.computation_type.value
        if name == _OVERLAPPED:
            yield from _translated(action.sub_actions)
        elif name in _KINDS:
            yield Action(_KINDS[name], action.stage_index, action.microbatch_index)
        elif name is not None and name not in _OF_ITS_RUNTIME:
            raise ScheduleError(f"unknown action {action} in a schedule of torch")


def _without_frozen(action: Action, shape: RoundShape) -> Iterator[Action]:
    """The action as it is in a round with frozen spans: changed, or left out.

    A frozen span has forwards only. The first span that trains has one whole backward in place of its second half,
    because no span waits for the gradient of its input.
    """
    if action.kind is ActionKind.FORWARD or shape.gives_gradient(action.span):
        yield action
    elif shape.trains(action.span) and action.kind is not ActionKind.INPUT_GRADIENT:
        yield Action(ActionKind.BACKWARD, action.span, action.chunk)
