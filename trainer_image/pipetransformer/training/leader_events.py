"""What the leader of a generation tells its listeners. All events come between rounds, on the training thread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipetransformer.state.control import Control
from pipetransformer_contract.messages import DurableCheckpoint


@dataclass(frozen=True, slots=True)
class LeaderEvent:
    """Something happened in the generation; `control` is the committed state after it."""

    control: Control


@dataclass(frozen=True, slots=True)
class GenerationBegun(LeaderEvent):
    """The generation is committed. `checkpoint` is the newest that is durable, None for none."""

    checkpoint: DurableCheckpoint | None


@dataclass(frozen=True, slots=True)
class FirstStepTaken(LeaderEvent):
    """The first step of the generation, or of another level within it, is committed.

    Attributes:
        pause_seconds: how long training paused for it.
        phases: seconds of the pause by phase.
        transfers: (source, target, bytes) of the state that moved.
        level_change: whether another level of the model began within the generation.
    """

    pause_seconds: float
    phases: Mapping[str, float]
    transfers: Sequence[tuple[int, int, int]]
    level_change: bool = False


@dataclass(frozen=True, slots=True)
class StepTaken(LeaderEvent):
    """A step is committed.

    Attributes:
        line: of the step in the run's record.
        finite: whether it changed the model; a step whose loss or gradients are not finite is skipped.
    """

    line: Mapping[str, Any]
    finite: bool


@dataclass(frozen=True, slots=True)
class StepSkipped(LeaderEvent):
    """The newest step changed nothing. `place` says where its numbers stopped being finite: a unit, or the loss."""

    place: str


@dataclass(frozen=True, slots=True)
class BoundaryMoved(LeaderEvent):
    """Layers froze, or train again, before step `control.step`. `control.why_thawed` says so if a trial failed."""


@dataclass(frozen=True, slots=True)
class LayersOffloaded(LeaderEvent):
    """Frozen layers leave the accelerators, because the caches have their outputs: `control.cached_layers`."""


@dataclass(frozen=True, slots=True)
class FreezeKept(LeaderEvent):
    """A trial ended, and the layers stay frozen. `why` says how the loss compares with its trend."""

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
    """The next level's model does not fit in the present layout, so the job makes no step until another one comes."""


@dataclass(frozen=True, slots=True)
class Finished(LeaderEvent):
    """The model is durable, and the run's record complete. `summary` is the content of `summary.json`."""

    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed(LeaderEvent):
    """The job cannot continue."""

    reason: str
    message: str


class LeaderListener(Protocol):
    """Takes what concerns it of a generation's events."""

    def on_event(self, event: LeaderEvent) -> None: ...
