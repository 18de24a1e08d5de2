"""Events that the leader of a generation sends to its listeners, between rounds and on the training thread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipetransformer.state.control import Control
from pipetransformer_contract.messages import DurableCheckpoint


@dataclass(frozen=True, slots=True)
class LeaderEvent:
    """An event in the generation. `control` is the committed control state after it."""

    control: Control


@dataclass(frozen=True, slots=True)
class GenerationBegun(LeaderEvent):
    """The generation is committed. `checkpoint` is the newest durable checkpoint; None if there is none."""

    checkpoint: DurableCheckpoint | None


@dataclass(frozen=True, slots=True)
class FirstStepTaken(LeaderEvent):
    """The first step of the generation, or the first after a level change within it, is committed.

    Attributes:
        pause_seconds: how long training paused before this step.
        phases: seconds of the pause by phase.
        transfers: (source rank, target rank, bytes) of the state that moved.
        level_change: whether the pause was a level change within the generation.
    """

    pause_seconds: float
    phases: Mapping[str, float]
    transfers: Sequence[tuple[int, int, int]]
    level_change: bool = False


@dataclass(frozen=True, slots=True)
class StepTaken(LeaderEvent):
    """A step is committed.

    Attributes:
        line: the step's line in the run's record.
        finite: whether the step changed the model. A step whose loss or gradients are not finite is skipped.
    """

    line: Mapping[str, Any]
    finite: bool


@dataclass(frozen=True, slots=True)
class StepSkipped(LeaderEvent):
    """The newest step was skipped and changed nothing. `place` says where its numbers stopped being finite: a unit, or
    the loss."""

    place: str


@dataclass(frozen=True, slots=True)
class BoundaryMoved(LeaderEvent):
    """Layers froze, or train again, before step `control.step`. If a trial of the freeze policy failed,
    `control.why_thawed` says why."""


@dataclass(frozen=True, slots=True)
class LayersOffloaded(LeaderEvent):
    """The first `control.cached_layers` layers leave the accelerators, because the caches have their outputs."""


@dataclass(frozen=True, slots=True)
class FreezeKept(LeaderEvent):
    """A trial of the freeze policy ended, and its layers stay frozen. `why` says how the loss compares with its
    trend."""

    why: str


@dataclass(frozen=True, slots=True)
class Evaluated(LeaderEvent):
    """The held-out samples were evaluated. `better` says whether this is the best evaluation so far."""

    better: bool


@dataclass(frozen=True, slots=True)
class CheckpointWritten(LeaderEvent):
    """A checkpoint is durable."""

    checkpoint: DurableCheckpoint


@dataclass(frozen=True, slots=True)
class WaitingForLevel(LeaderEvent):
    """The next level's model does not fit in the present layout, so the job makes no step until a larger layout
    comes. Told again after each vote while it waits."""


@dataclass(frozen=True, slots=True)
class Finished(LeaderEvent):
    """The final model is durable, and the run's record is complete. `summary` is the content of `summary.json`."""

    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed(LeaderEvent):
    """The job cannot continue. `reason` is the reason as one CamelCase word, `message` says it in words."""

    reason: str
    message: str


class LeaderListener(Protocol):
    """Receives all events of a generation, and ignores those that it has no use for."""

    def on_event(self, event: LeaderEvent) -> None: ...
