"""Messages of the channel between workers and operator: reports, heartbeats and generations.

A report has the whole state of the job, as its leader knows it. The leader sends it until the operator acknowledges it.
Reports are ordered by (`layout_generation`, `step`), so a repeated or lost report does no harm.
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
#: Maximum length of a reason in a report, in characters.
MAX_WHY = 256
MAX_LOST_PEERS = 64
#: Length of a token of `checkpoint now`.
MAX_TOKEN = 63
MAX_MEMBERS = 8192

Count = Annotated[int, Field(ge=0, le=2**53)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=253)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _check_distinct(keys: Sequence[int], name: str) -> None:
    """Refuses a duplicate key. Otherwise the API server would later refuse the status that contains the list."""
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

    START = "Start"  #: the first layout of the job, or of a resumed job
    PACK = "Pack"  #: shorter pipelines, and more of them, with the same workers
    DEEPEN = "Deepen"  #: more stages without more workers, because layers train again
    RELEASE = "Release"  #: fewer workers, because the model no longer needs them
    CLAIM = "Claim"  #: more workers
    FAILURE = "Failure"  #: a member was lost, or live members lost their connections
    DRAIN = "Drain"  #: a member was taken away: preempted, evicted, drained or deleted
    SPEC = "Spec"  #: the user changed elasticPolicy
    BALANCE = "Balance"  #: the same layout, with stages cut again for the layers that are frozen now
    UNDO = "Undo"  #: back to a layout that worked: members could not commit the last one, or it ran out of memory


class GenerationNotice(Wire):
    """Tells a worker that a generation names it as a member or leaver, and which leader hosts the rendezvous.

    Most workers get only this from the channel. They read the `Generation` from the store of the leader, by the same
    `job_uid`, `layout_generation` and `nonce`.
    """

    job_uid: Name
    layout_generation: Positive
    nonce: Name
    leader: Member

    def announces(self, generation: "Generation") -> bool:
        """Whether this is the notice of `generation`, with the same leader and nonce."""
        return generation.leader in [member.name for member in generation.members] and generation.notice() == self


class Generation(Wire):
    """A layout with its members. The operator writes it to the status, and then tells the workers (it publishes it).

    `leavers` keep their state until the members have committed this generation. Then they wait for another generation,
    or are deleted. They are released once a checkpoint includes `boundary`, the number of frozen layers since
    `boundary_step`. The leader hosts the store of the rendezvous. `nonce` separates the keys of this generation
    from those of other generations, and of other jobs, in the same store. The resize is in progress while
    `confirmed_generation` is below `layout_generation`. The operator changes the last three fields later, so workers do
    not get them.
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
    nonce: Name = Field(description="Separates this generation's keys in a store from others. It is not a secret.")
    reason: ResizeReason
    boundary: Count = Field(default=0, description="Frozen layers that the layout was chosen for.")
    boundary_step: Count = Field(default=0, description="Step since which these layers are frozen.")
    confirmed_generation: Count = Field(
        default=0, description="Newest generation that the leader reported as committed."
    )
    published_time: datetime | None = Field(default=None, description="When the generation was published.")
    broken_before: Count = Field(
        default=0, description="Number of generations just before this one that made no step although all members live."
    )

    @property
    def layout(self) -> Layout:
        return Layout(self.stages, self.pipelines)

    @property
    def confirmed(self) -> bool:
        return self.confirmed_generation >= self.layout_generation

    def covered_by(self, checkpoint: "DurableCheckpoint | None") -> bool:
        """Whether the checkpoint includes the frozen layers that the layout was chosen for.

        A checkpoint that this generation wrote counts in any case. After a failure, its step may be before
        `boundary_step`."""
        return checkpoint is not None and (
            checkpoint.step >= self.boundary_step or checkpoint.layout_generation >= self.layout_generation
        )

    def for_workers(self) -> "Generation":
        """The generation as workers get it, without the fields that the operator changes later."""
        return self.model_copy(update={"confirmed_generation": 0, "published_time": None, "broken_before": 0})

    def notice(self) -> GenerationNotice:
        """The notice that tells workers of this generation.

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
        """The member that is the leader.

        Raises:
            ValueError: the leader is not among the members.
        """
        for member in self.members:
            if member.name == self.leader:
                return member
        raise ValueError(f"generation {self.layout_generation}: leader {self.leader!r} is not a member")


class Ready(Wire):
    """A worker's message that it is ready for a generation, and the address of its store."""

    address: Name = Field(description="host:port of the worker's store.")

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
    """What the model can do now with one number of stages: step time, memory and pause of the change to it.

    With packing Measured the trainer measures them. With packing Paper it computes them from the model alone.
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
    """A checkpoint that outlives all workers. If all workers end, this alone decides the layout of the next start."""

    step: Count = Field(description="Number of committed steps in it.")
    boundary: Count = Field(description="Number of frozen layers.")
    min_stages: Positive = Field(description="Number of stages with which a restart begins.")
    layout_generation: Count = Field(
        default=0, description="Generation of the workers that wrote it. 0 if an earlier job wrote it."
    )
    num_shards: Positive | None = Field(
        default=None, description="Number of shards of the data's order. A restart has at most this many pipelines."
    )
    request: str = Field(
        default="", max_length=MAX_TOKEN, description="Token of the request that it answers. Empty without one."
    )
    pause_seconds: Seconds | None = Field(
        default=None, description="Seconds that training paused for it. Absent if the leader did not write it."
    )
    write_seconds: Seconds | None = Field(
        default=None, description="Seconds from its beginning until it was durable. Absent as `pauseSeconds`."
    )


class Outcome(StrEnum):
    """How the job ended, as the leader reports it."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class HeldOut(Wire):
    """The result of the newest evaluation on the held-out samples."""

    metric: Name = Field(description="Name of the metric: `evaluation.bestMetric`.")
    value: Annotated[float, Field(allow_inf_nan=False)] = Field(description="Value of the metric.")
    step: Count = Field(description="Committed steps at the evaluation.")


class Upcoming(Wire):
    """The next, larger model of `multiLevel`, which the job will soon train. The report's offers are for this model, so
    that the operator can claim workers for it in advance."""

    step: Count = Field(description="First step (from 0) that the larger model trains.")
    level: Count = Field(description="Level of the larger model. Level 0 is the job's own model.")
    waits: bool = Field(
        default=False,
        description="Whether the job waits and makes no step, because the larger model does not fit in the memory of"
        " the present layout.",
    )


class Report(Wire):
    """The state of the job, as its leader knows it. A report says that all members have committed `layout_generation`.

    The number of frozen layers, `boundary`, may fall again. The leader computes `step_seconds`, `offers` and
    `starting_step_seconds` at the same time, so the operator can compare them.
    """

    job_uid: Name = Field(description="UID of the job.")
    layout_generation: Positive = Field(description="Generation that all members have committed.")
    step: Count = Field(description="Committed steps.")
    epoch: Count = Field(default=0, description="Present epoch, counted from 0.")
    boundary: Count = Field(description="Number of frozen layers.")
    boundary_step: Count = Field(default=0, description="Step since which these layers are frozen.")
    why_thawed: str = Field(
        default="",
        max_length=MAX_WHY,
        description="Why layers thawed at boundaryStep: why the trial of a freeze failed. Empty if none failed.",
    )
    num_layers: Positive = Field(description="Number of layers of the model.")
    stage_layers: list[Count] = Field(
        default_factory=list, max_length=4096, description="Number of layers of each stage."
    )
    stage_frozen_layers: list[Count] = Field(
        default_factory=list, max_length=4096, description="Number of frozen layers of each stage."
    )
    schedule: str = Field(default="", max_length=64, description="Schedule that the layout runs.")
    why_schedule: str = Field(
        default="",
        max_length=MAX_WHY,
        description="Why the layout does not run the schedule of the spec. Empty if it does.",
    )
    frozen_forward: str = Field(default="", max_length=64, description="When frozen layers compute: InPlace or Ahead.")
    why_frozen_forward: str = Field(
        default="",
        max_length=MAX_WHY,
        description="Why frozenForward differs from the spec's. Empty if it does not.",
    )
    bytes_budget: Count = Field(description="Memory that the first layout's largest stage needed, in bytes.")
    offers: list[Offer] = Field(
        default_factory=list,
        max_length=MAX_OFFERS,
        description="What the model can do now with each number of stages (K).",
    )
    level: Count = Field(
        default=0,
        description="With multiLevel, the level whose model trains now. Level 0 is the job's own model, and higher"
        " levels are smaller models.",
    )
    upcoming: Upcoming | None = None
    checkpoint: DurableCheckpoint | None = None
    redone_steps: Count = Field(
        default=0, description="Steps that were committed before, and that this generation trains again."
    )
    loss: float | None = Field(default=None, allow_inf_nan=False, description="Mean loss of the newest step.")
    samples_per_second: Seconds | None = Field(default=None, description="Samples per second of all workers together.")
    step_seconds: Seconds | None = Field(
        default=None, description="Step time of the present layout, in seconds. Absent until it is measured."
    )
    starting_step_seconds: Seconds | None = Field(
        default=None,
        description="Predicted step time of the job's first layout with no frozen layers, in seconds. Absent as"
        " `stepSeconds`, or if that layout no longer fits in memory.",
    )
    total_steps: Count | None = Field(default=None, description="Steps of the whole job.")
    seconds_left: Seconds | None = Field(
        default=None,
        description="Seconds until the last step, from the measured step time of the present layout. Absent until that"
        " is measured. With multiLevel also absent until level 0 trains for the last time. Evaluations, checkpoints and"
        " resizes take extra time.",
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
        """Whether this report is newer than `other`. A report that is sent again is not newer than itself."""
        if other is None:
            return True
        return self._order > other._order

    @property
    def _order(self) -> tuple[int, int, int, bool, bool, int]:
        """A value that grows with each new report of a job. Two reports of the same step differ in one of the last four
        parts."""
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
        """Words to put after a layout: the schedule that it runs, and why it is not the spec's. Empty if unknown."""
        why = f" ({self.why_schedule})" if self.why_schedule else ""
        return f", {self.schedule}{why}" if self.schedule else ""

    @property
    def remaining_steps(self) -> int | None:
        """Number of steps until the job's end; None if the trainer does not report the total."""
        return None if self.total_steps is None else max(0, self.total_steps - self.step)

    @property
    def checkpoint_step(self) -> int:
        """Step of the durable checkpoint; -1 without one."""
        return -1 if self.checkpoint is None else self.checkpoint.step


class ReportReply(Wire):
    """Acknowledges a report. `layout_generation` is the newest published generation.

    If only the progress is new, the next report may wait `next_seconds` seconds. If this is absent, the worker decides.
    `checkpoint_request` is as in `HeartbeatReply`. The leader hears it here sooner in a large fleet.
    """

    layout_generation: Count
    next_seconds: Seconds | None = None
    checkpoint_request: str = ""


class Heartbeat(Wire):
    """Sign of life of a worker.

    `layout_generation` is the newest generation that this worker has committed or left with; 0 for none. A
    worker that is in no group sets `waiting_after`, and waits for a generation above this number. It left with that
    generation, or the generation broke, or its members never met. Then `lost_peers` names members that may be lost. A
    broken connection does not tell which of them is. `why_broken` says why the worker lost its group, until it is in a
    group again. `unsaved` says why the worker cannot write its part of a checkpoint; empty otherwise.
    """

    layout_generation: Count
    waiting_after: Count | None = None
    lost_peers: list[Name] = Field(default_factory=list, max_length=MAX_LOST_PEERS)
    why_broken: str = Field(default="", max_length=MAX_MESSAGE)
    unsaved: str = Field(default="", max_length=MAX_MESSAGE)


class HeartbeatReply(Wire):
    """Answers a heartbeat with the newest published generation. So a leader learns of it without a long-poll.

    The operator expects the next heartbeat after `next_seconds` seconds, or sooner if something happens. If this is
    absent, the worker decides. `stop` tells the members to exit once a checkpoint of their state is durable. The
    operator never takes it back.
    `checkpoint_request` is the token of a checkpoint that the members shall write after the next step. It is empty
    without one, and once the operator knows that the checkpoint is durable.
    """

    layout_generation: Count
    next_seconds: Seconds | None = None
    stop: bool = False
    checkpoint_request: str = ""
