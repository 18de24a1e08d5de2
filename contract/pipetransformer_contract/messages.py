"""Messages of the channel: what workers report and which generations they get.

A report is the whole state of the job as its leader knows it. The leader sends it until the operator acknowledges it.
Reports are ordered by (`layout_generation`, `step`), so repeated and lost ones do no harm.
"""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from .layout import Layout
from .wire import Wire

MAX_OFFERS = 16
MAX_MESSAGE = 1024
MAX_LOST_PEERS = 64
MAX_MEMBERS = 8192

Count = Annotated[int, Field(ge=0, le=2**53)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=253)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _check_distinct(keys: Sequence[int], name: str) -> None:
    """Refuses a duplicate key here, so that it does not fail later when the status is written."""
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise ValueError(f"more than one has {name} {twice[0]}")


class Member(Wire):
    """A worker of a generation. `address` is host:port of the TCPStore that this worker hosts."""

    name: Name = Field(description="Name of the pod.")
    uid: Name = Field(description="UID of the pod.")
    address: Name = Field(description="host:port of the worker's store.")
    node: str = Field(default="", max_length=253, description="Node that the worker runs on.")


class ResizeReason(StrEnum):
    """Why a generation exists."""

    START = "Start"  #: the job's first layout, also after a resume
    PACK = "Pack"  #: fewer stages with the same workers, so more pipelines
    DEEPEN = "Deepen"  #: more stages without more workers, because layers train again
    RELEASE = "Release"  #: fewer workers, because the model no longer needs them
    CLAIM = "Claim"  #: more workers
    FAILURE = "Failure"  #: a member was lost, or live members lost their connections
    DRAIN = "Drain"  #: a member was taken away: preempted, evicted, drained or deleted
    SPEC = "Spec"  #: the user changed elasticPolicy
    BALANCE = "Balance"  #: the same layout, with stages cut again for the layers that are frozen now
    UNDO = "Undo"  #: back to a layout that works: the last one could not be committed, or ran out of memory


class GenerationNotice(Wire):
    """Tells a worker that a generation names it, and where its members meet.

    Most workers ask the channel only for this. They get the `Generation` from the store that the leader hosts, under
    the same three keys.
    """

    job_uid: Name
    layout_generation: Positive
    nonce: Name
    leader: Member

    def announces(self, generation: "Generation") -> bool:
        """Whether this is exactly the notice of `generation`."""
        return generation.leader in [member.name for member in generation.members] and generation.notice() == self


class Generation(Wire):
    """One published layout and its members, in rank order. The operator writes it to the status before it publishes it.

    `leavers` hold state until the members have committed this generation. Then they wait for one that names them, or
    are deleted. The leader hosts the store of the rendezvous. `nonce` keeps the keys of two generations apart, and
    those of two jobs with the same address. `boundary` is in force since `boundary_step`. Leavers are released once a
    checkpoint includes it. The resize is in progress while `confirmed_generation` is below `layout_generation`.
    The operator changes the last three fields, so workers do not get them.
    """

    job_uid: Name = Field(description="UID of the job.")
    layout_generation: Positive = Field(description="Number of the generation.")
    stages: Positive = Field(description="Workers per pipeline (K).")
    pipelines: Positive = Field(description="Data-parallel width (R).")
    members: list[Member] = Field(min_length=1, max_length=MAX_MEMBERS, description="Workers in rank order.")
    leavers: list[Member] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Workers that hold state until the members have committed.",
    )
    leader: Name = Field(description="Member that hosts the rendezvous and reports.")
    nonce: Name = Field(description="Keeps the keys of two rendezvous apart. It is not a secret.")
    reason: ResizeReason
    boundary: Count = Field(default=0, description="Frozen layers that the layout was chosen for.")
    boundary_step: Count = Field(default=0, description="Step since which these layers are frozen.")
    confirmed_generation: Count = Field(
        default=0, description="Newest generation that the leader reported as committed."
    )
    published_time: datetime | None = Field(default=None, description="When the generation was published.")
    broken_before: Count = Field(
        default=0, description="Previous generations in a row that made no step although all members live."
    )

    @property
    def layout(self) -> Layout:
        return Layout(self.stages, self.pipelines)

    @property
    def confirmed(self) -> bool:
        return self.confirmed_generation >= self.layout_generation

    def covered_by(self, checkpoint: "DurableCheckpoint | None") -> bool:
        """Whether the checkpoint includes the boundary that the layout was chosen for, or was written by the layout.

        After a failure the layout itself may start at an earlier step."""
        return checkpoint is not None and (
            checkpoint.step >= self.boundary_step or checkpoint.layout_generation >= self.layout_generation
        )

    def for_workers(self) -> "Generation":
        """The generation as the channel gives it to members and leavers. It never changes."""
        return self.model_copy(update={"confirmed_generation": 0, "published_time": None, "broken_before": 0})

    def notice(self) -> GenerationNotice:
        """The message that each of its workers gets first.

        Raises:
            ValueError: the leader is not among the members.
        """
        return GenerationNotice(
            job_uid=self.job_uid,
            layout_generation=self.layout_generation,
            nonce=self.nonce,
            leader=self.leader_member(),
        )

    def leader_member(self) -> Member:
        """The member that hosts the store.

        Raises:
            ValueError: the leader is not among the members.
        """
        for member in self.members:
            if member.name == self.leader:
                return member
        raise ValueError(f"generation {self.layout_generation}: leader {self.leader!r} is not a member")


class Ready(Wire):
    """A worker that is ready to join: where its store listens, and which versions it runs."""

    address: Name = Field(description="host:port of the worker's store.")
    versions: dict[Name, Annotated[str, Field(max_length=253)]] = Field(default_factory=dict, max_length=16)

    @field_validator("address")
    @classmethod
    def _has_a_port(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise ValueError(f"{address!r} is not HOST:PORT, such as 10.0.0.7:29500")
        return address


class StepTime(Wire):
    """Predicted time of one step with `pipelines` pipelines."""

    pipelines: Positive = Field(description="Data-parallel width (R).")
    seconds: Seconds = Field(description="Time of one step, in seconds.")


class Offer(Wire):
    """What the model can do now at one number of stages. The trainer measures it, or computes it for `packing: Paper`.

    `bytes_per_worker` is the largest stage's share of memory. `pause_seconds` is the expected cost of a change to it.
    """

    stages: Positive = Field(description="Workers per pipeline (K).")
    step_seconds: list[StepTime] = Field(
        default_factory=list, max_length=64, description="Time of one step, by number of pipelines."
    )
    bytes_per_worker: Count = Field(description="Memory that the largest stage needs, in bytes.")
    pause_seconds: Seconds = Field(
        default=0.0, description="Expected pause of a change to this number of stages, in seconds."
    )

    @field_validator("step_seconds")
    @classmethod
    def _widths_differ(cls, times: list[StepTime]) -> list[StepTime]:
        _check_distinct([time.pipelines for time in times], "pipelines")
        return times


class DurableCheckpoint(Wire):
    """A checkpoint that outlives every worker. When the job starts again, only this decides its layout."""

    step: Count = Field(description="Committed steps that it holds.")
    boundary: Count = Field(description="Frozen layers.")
    min_stages: Positive = Field(description="Stages with which a restart begins.")
    layout_generation: Count = Field(default=0, description="Generation of the workers that wrote it.")
    num_shards: Positive | None = Field(default=None, description="Shards of the data order that a restart resumes.")


class Outcome(StrEnum):
    """How the job ended, as the leader reports it."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class HeldOut(Wire):
    """The newest evaluation on the held-out samples, by the metric that decides which evaluation is best."""

    metric: Name = Field(description="`evaluation.bestMetric`.")
    value: Annotated[float, Field(allow_inf_nan=False)] = Field(description="Value of the metric.")
    step: Count = Field(description="Committed steps at the evaluation.")


class Upcoming(Wire):
    """The larger model of `multiLevel` that the job continues with before long. The report's offers are of it, so that
    its workers can be claimed ahead."""

    step: Count = Field(description="Step before which the larger model begins.")
    level: Count = Field(description="Its level; 0 is the job's own model.")
    waits: bool = Field(
        default=False,
        description="Whether the job makes no step because that model does not fit in the workers of the present"
        " layout.",
    )


class Report(Wire):
    """Everything that the leader knows. The report confirms that every member has committed `layout_generation`.

    `boundary` counts frozen layers of `num_layers`, since `boundary_step`. It may fall again. `stage_layers` says how
    many layers each stage holds, and `stage_frozen_layers` how many of these are frozen. `bytes_budget` is the memory
    that the first layout's largest stage needed. `step_seconds` is of the present layout as it is cut now. It is
    renewed with the offers and with `starting_step_seconds`, so all are comparable.
    """

    job_uid: Name = Field(description="UID of the job.")
    layout_generation: Positive = Field(description="Generation that all members have committed.")
    step: Count = Field(description="Committed steps.")
    epoch: Count = Field(default=0, description="Present epoch, counted from 0.")
    boundary: Count = Field(description="Frozen layers.")
    boundary_step: Count = Field(default=0, description="Step since which these layers are frozen.")
    why_thawed: str = Field(
        default="", max_length=256, description="Why layers thawed there. Empty if no trial of a freeze failed."
    )
    num_layers: Positive = Field(description="Layers of the model.")
    stage_layers: list[Count] = Field(default_factory=list, max_length=4096, description="Layers of each stage.")
    stage_frozen_layers: list[Count] = Field(
        default_factory=list, max_length=4096, description="Frozen layers of each stage."
    )
    schedule: str = Field(default="", max_length=64, description="Schedule that the layout runs.")
    why_schedule: str = Field(
        default="", max_length=256, description="Why it is not the schedule of the spec. Empty if it is."
    )
    frozen_forward: str = Field(default="", max_length=64, description="When frozen layers compute: InPlace or Ahead.")
    why_frozen_forward: str = Field(
        default="", max_length=256, description="Why that is not what the spec says. Empty if it is."
    )
    bytes_budget: Count = Field(description="Memory that the first layout's largest stage needed, in bytes.")
    offers: list[Offer] = Field(
        default_factory=list,
        max_length=MAX_OFFERS,
        description="What the model can do now with each number of stages (K).",
    )
    level: Count = Field(default=0, description="Level of multiLevel that trains; 0 is the job's own model.")
    upcoming: Upcoming | None = None
    checkpoint: DurableCheckpoint | None = None
    loss: float | None = Field(default=None, allow_inf_nan=False, description="Mean loss of the newest step.")
    samples_per_second: Seconds | None = Field(default=None, description="Samples per second of all workers together.")
    step_seconds: Seconds | None = Field(default=None, description="Step time of the present layout, in seconds.")
    starting_step_seconds: Seconds | None = Field(
        default=None,
        description="Predicted step time of the job's first layout with no frozen layers, in seconds. Absent until"
        " costs are measured.",
    )
    total_steps: Count | None = Field(default=None, description="Steps of the whole job.")
    seconds_left: Seconds | None = Field(
        default=None,
        description="Seconds until the last step, from the measured step time of the present layout. Absent until that"
        " is measured, and before the last visit of multiLevel. Evaluations, checkpoints and resizes take extra time.",
    )
    held_out: HeldOut | None = None
    outcome: Outcome | None = None
    reason: str = Field(
        default="", max_length=64, pattern=r"^([A-Z][A-Za-z0-9]*)?$", description="Reason of a failure, in one word."
    )
    message: str = Field(default="", max_length=MAX_MESSAGE, description="Explanation of a failure.")

    @field_validator("offers")
    @classmethod
    def _lengths_differ(cls, offers: list[Offer]) -> list[Offer]:
        _check_distinct([offer.stages for offer in offers], "stages")
        return offers

    def newer_than(self, other: "Report | None") -> bool:
        """Whether this report says more than `other`. A repeated report does not."""
        if other is None:
            return True
        return self._order > other._order

    @property
    def _order(self) -> tuple[int, int, int, bool, bool, int]:
        """Grows with each new report of a job. Reports of the same step differ in one of the last four values."""
        return (
            self.layout_generation,
            self.step,
            self.boundary_step,
            self.upcoming is not None and self.upcoming.waits,
            self.outcome is not None,
            self.checkpoint_step,
        )

    @property
    def schedule_words(self) -> str:
        """The schedule, and why it is not the spec's, as words that follow a layout; empty if unknown."""
        why = f" ({self.why_schedule})" if self.why_schedule else ""
        return f", {self.schedule}{why}" if self.schedule else ""

    @property
    def remaining_steps(self) -> int | None:
        """Steps until the job's end; None if the trainer does not report it."""
        return None if self.total_steps is None else max(0, self.total_steps - self.step)

    @property
    def checkpoint_step(self) -> int:
        """Step of the durable checkpoint; -1 without one."""
        return -1 if self.checkpoint is None else self.checkpoint.step


class ReportReply(Wire):
    """Acknowledges a report. `layout_generation` is the newest published one.

    `next_seconds` is how long a report may wait if only progress is new. Without it the worker uses its own pace.
    """

    layout_generation: Count
    next_seconds: Seconds | None = None


class Heartbeat(Wire):
    """Sign of life of a worker.

    `layout_generation` is the newest generation that this worker has committed or left with; 0 for none. A worker in no
    group sets `waiting_after`: it waits for a generation above this number. It left with that generation, or that one
    broke or never formed. `lost_peers` are then members that it may have lost, because a broken connection does not
    name the lost one. `because` is why, as the worker saw it, until it is in a group again. `unsaved` is why the worker
    cannot write its part of a checkpoint yet.
    """

    layout_generation: Count
    step: Count
    waiting_after: Count | None = None
    lost_peers: list[Name] = Field(default_factory=list, max_length=MAX_LOST_PEERS)
    because: str = Field(default="", max_length=MAX_MESSAGE)
    unsaved: str = Field(default="", max_length=MAX_MESSAGE)


class HeartbeatReply(Wire):
    """The newest published generation, so that a leader learns about it without a long-poll.

    `next_seconds` is when the operator expects the next heartbeat, unless something happens. Without it the worker uses
    its own pace. `stop` tells the members to exit once a checkpoint of their state is durable. It is never taken back.
    """

    layout_generation: Count
    next_seconds: Seconds | None = None
    stop: bool = False
