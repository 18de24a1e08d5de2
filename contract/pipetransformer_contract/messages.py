"""Messages of the channel: what workers report and which generations they get.

A report is the whole state of the job as its leader knows it. It is sent again until acknowledged and ordered by
(`layout_generation`, `step`), so a replay is harmless and a lost one costs nothing.
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
    """Refuses a key that is there twice: it is an error here, and not only once the status is to be written."""
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise ValueError(f"more than one has {name} {twice[0]}")


class Member(Wire):
    """A worker of a generation. `address` is host:port of the TCPStore that this worker hosts."""

    name: Name = Field(description="The pod's.")
    uid: Name = Field(description="The pod's.")
    address: Name = Field(description="host:port of its store.")
    node: str = Field(default="", max_length=253, description="Where it runs.")


class ResizeReason(StrEnum):
    """Why a generation exists."""

    START = "Start"  #: the job's first layout, also after a resume
    PACK = "Pack"  #: fewer stages, the same workers: more pipelines
    DEEPEN = "Deepen"  #: more stages on no more workers, because layers train again
    RELEASE = "Release"  #: fewer workers, because the model no longer needs them
    CLAIM = "Claim"  #: more workers
    FAILURE = "Failure"  #: a member was lost, or members that live lost each other
    DRAIN = "Drain"  #: a member was taken away: preempted, evicted, drained or deleted
    SPEC = "Spec"  #: the user changed elasticPolicy
    BALANCE = "Balance"  #: the same layout, its stages cut anew for what is frozen now
    UNDO = "Undo"  #: the generation before could not be committed, or trained in its memory: back to what could


class GenerationNotice(Wire):
    """Tells a worker that a generation names it, and where its members meet: all that most workers ask the channel for.

    The leader hands the `Generation` on in the store that it hosts, under the same three keys.
    """

    job_uid: Name
    layout_generation: Positive
    nonce: Name
    leader: Member

    def announces(self, generation: "Generation") -> bool:
        """Whether this is the notice of `generation`, and of no other."""
        return generation.leader in [member.name for member in generation.members] and generation.notice() == self


class Generation(Wire):
    """One published layout and its members, in rank order. It stands in the job's status before the channel shows it.

    `leavers` hold state until the members have committed this generation; then they wait for one that names them, or
    for their end. The leader hosts the store of the rendezvous; `nonce` keeps the keys of two generations, or of two
    jobs that got the same address, apart. A checkpoint must know `boundary`, in force since `boundary_step`, before
    leavers are given back. A `confirmed_generation` below `layout_generation` says that the change is still under way.
    Workers do not get the last three fields, which the operator changes.
    """

    job_uid: Name = Field(description="Of the job that it belongs to.")
    layout_generation: Positive = Field(description="Number of the generation.")
    stages: Positive = Field(description="Workers a pipeline (K).")
    pipelines: Positive = Field(description="Data-parallel width (R).")
    members: list[Member] = Field(min_length=1, max_length=MAX_MEMBERS, description="Workers in rank order.")
    leavers: list[Member] = Field(
        default_factory=list, max_length=MAX_MEMBERS, description="Workers that hold state until the members committed."
    )
    leader: Name = Field(description="Member that hosts the rendezvous and reports.")
    nonce: Name = Field(description="Keeps the keys of two rendezvous apart; no secret.")
    reason: ResizeReason
    boundary: Count = Field(default=0, description="Frozen layers that the layout was chosen for.")
    boundary_step: Count = Field(default=0, description="Step since which they are frozen.")
    confirmed_generation: Count = Field(default=0, description="Newest generation that the leader reported committed.")
    published_time: datetime | None = Field(default=None, description="When it was published.")
    broken_before: Count = Field(
        default=0, description="Generations in a row before it in which no step was made, although all members live."
    )

    @property
    def layout(self) -> Layout:
        return Layout(self.stages, self.pipelines)

    @property
    def confirmed(self) -> bool:
        return self.confirmed_generation >= self.layout_generation

    def covered_by(self, checkpoint: "DurableCheckpoint | None") -> bool:
        """Whether a restart from the checkpoint would know the boundary that the layout was chosen for, or come from
        the layout itself (after a failure it may start at an earlier step)."""
        return checkpoint is not None and (
            checkpoint.step >= self.boundary_step or checkpoint.layout_generation >= self.layout_generation
        )

    def for_workers(self) -> "Generation":
        """What the channel hands to members and leavers: it never changes."""
        return self.model_copy(update={"confirmed_generation": 0, "published_time": None, "broken_before": 0})

    def notice(self) -> GenerationNotice:
        """What each worker of it is told first.

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
    """A worker that could join: where its store listens, and what it runs."""

    address: Name = Field(description="host:port of its store.")
    versions: dict[Name, Annotated[str, Field(max_length=253)]] = Field(default_factory=dict, max_length=16)

    @field_validator("address")
    @classmethod
    def _has_a_port(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise ValueError(f"{address!r} is not HOST:PORT, such as 10.0.0.7:29500")
        return address


class StepTime(Wire):
    """Predicted seconds of one step at a data-parallel width of `pipelines`."""

    pipelines: Positive = Field(description="Data-parallel width (R).")
    seconds: Seconds = Field(description="Of one step.")


class Offer(Wire):
    """What the model can do at one pipeline length now, measured (or, for `packing: Paper`, computed) by the trainer.

    `bytes_per_worker` is the largest stage's share of memory; `pause_seconds` the expected cost of moving there.
    """

    stages: Positive = Field(description="Workers a pipeline (K).")
    step_seconds: list[StepTime] = Field(default_factory=list, max_length=64, description="By width.")
    bytes_per_worker: Count = Field(description="Largest stage's share of memory.")
    pause_seconds: Seconds = Field(default=0.0, description="Expected cost of moving there.")

    @field_validator("step_seconds")
    @classmethod
    def _widths_differ(cls, times: list[StepTime]) -> list[StepTime]:
        _check_distinct([time.pipelines for time in times], "pipelines")
        return times


class DurableCheckpoint(Wire):
    """A checkpoint that outlives every worker: a job is sized from it, and from nothing else, when it starts again."""

    step: Count = Field(description="Committed steps that it holds.")
    boundary: Count = Field(description="Frozen layers.")
    min_stages: Positive = Field(description="Stages with which a restart begins.")
    layout_generation: Count = Field(default=0, description="Of those that wrote it.")
    num_shards: Positive | None = Field(default=None, description="Shards of the data order that it goes on in.")


class Outcome(StrEnum):
    """How the leader says that the job ended."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class HeldOut(Wire):
    """The newest evaluation on the held-out samples, by the metric that evaluations are judged by."""

    metric: Name = Field(description="`evaluation.bestMetric`.")
    value: Annotated[float, Field(allow_inf_nan=False)] = Field(description="Of the metric.")
    step: Count = Field(description="Committed steps at the evaluation.")


class Report(Wire):
    """The leader's whole knowledge. `layout_generation` is committed by every member: this report confirms it.

    `boundary` counts frozen layers of `num_layers`, since `boundary_step`; it may fall again. `stage_layers` says how
    many layers each stage holds; `bytes_budget` is what the first layout's largest stage needed. `step_seconds` is of
    the present layout as it is cut now, renewed with the offers and comparable with theirs; `total_steps` is the job's.
    """

    job_uid: Name = Field(description="Of the job that it speaks of.")
    layout_generation: Positive = Field(description="Generation that all members have committed.")
    step: Count = Field(description="Committed steps.")
    epoch: Count = Field(default=0, description="That trains now, from 0.")
    boundary: Count = Field(description="Frozen layers.")
    boundary_step: Count = Field(default=0, description="Step since which they are frozen.")
    num_layers: Positive = Field(description="Layers of the model.")
    stage_layers: list[Count] = Field(default_factory=list, max_length=4096, description="Layers of each stage.")
    bytes_budget: Count = Field(description="What the first layout's largest stage needed.")
    offers: list[Offer] = Field(
        default_factory=list, max_length=MAX_OFFERS, description="What the model can do at each K now."
    )
    checkpoint: DurableCheckpoint | None = None
    loss: float | None = Field(default=None, allow_inf_nan=False, description="Mean of the newest step.")
    samples_per_second: Seconds | None = Field(default=None, description="All workers together.")
    step_seconds: Seconds | None = Field(default=None, description="Of the present layout, as it is cut.")
    total_steps: Count | None = Field(default=None, description="Of the job.")
    seconds_left: Seconds | None = Field(
        default=None,
        description="Until the last step, by the measured step time of the present layout; absent until it is measured."
        " Evaluations, checkpoints and resizes take longer.",
    )
    held_out: HeldOut | None = None
    outcome: Outcome | None = None
    reason: str = Field(
        default="", max_length=64, pattern=r"^([A-Z][A-Za-z0-9]*)?$", description="Of a failure, in one word."
    )
    message: str = Field(default="", max_length=MAX_MESSAGE, description="Of a failure.")

    @field_validator("offers")
    @classmethod
    def _lengths_differ(cls, offers: list[Offer]) -> list[Offer]:
        _check_distinct([offer.stages for offer in offers], "stages")
        return offers

    def newer_than(self, other: "Report | None") -> bool:
        """Whether this report says more than `other` does (a replay does not)."""
        if other is None:
            return True
        return self._order > other._order

    @property
    def _order(self) -> tuple[int, int, int, bool, int]:
        """Only grows within a job: what is reported again at the same step differs in one of the last three."""
        return (
            self.layout_generation,
            self.step,
            self.boundary_step,
            self.outcome is not None,
            self.checkpoint_step,
        )

    @property
    def remaining_steps(self) -> int | None:
        """Steps until the job's end, None when the trainer does not say."""
        return None if self.total_steps is None else max(0, self.total_steps - self.step)

    @property
    def checkpoint_step(self) -> int:
        """Step of the durable checkpoint, -1 without one."""
        return -1 if self.checkpoint is None else self.checkpoint.step


class ReportReply(Wire):
    """Acknowledges a report. `layout_generation` is the newest published one.

    `next_seconds` is how long mere progress may wait before the next; without it the worker uses its own pace.
    """

    layout_generation: Count
    next_seconds: Seconds | None = None


class Heartbeat(Wire):
    """Sign of life of a worker.

    `layout_generation` is the newest that this worker has committed, or left with, 0 for none. A worker that is in no
    group says in `waiting_after` above which generation the next one must be: it left with the generation of that
    number, or that broke, or did not come about. `lost_peers` are then those that it may have lost: a broken connection
    does not say whom. `because` is why, as it saw it, until it is in a group again. `unsaved` is why the checkpoint
    that the worker was told to leave cannot be written yet.
    """

    layout_generation: Count
    step: Count
    waiting_after: Count | None = None
    lost_peers: list[Name] = Field(default_factory=list, max_length=MAX_LOST_PEERS)
    because: str = Field(default="", max_length=MAX_MESSAGE)
    unsaved: str = Field(default="", max_length=MAX_MESSAGE)


class HeartbeatReply(Wire):
    """The newest published generation, so that a leader learns of it without a long-poll.

    `next_seconds` is when the next is expected, unless something happens; without it the worker uses its own pace.
    `stop` tells the members to end once a checkpoint of their state is durable; it is never taken back.
    """

    layout_generation: Count
    next_seconds: Seconds | None = None
    stop: bool = False
