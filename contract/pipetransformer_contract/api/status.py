"""The status of a `PipeTrainingJob`: all that the operator remembers about a job.

It is written before anything is done about it, so an operator that dies between two writes finds here what it meant to
do. Nothing else is remembered: what is not in here is observed again.
"""

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import (
    Count,
    DurableCheckpoint,
    Generation,
    Name,
    Positive,
    Report,
    ResizeReason,
    Seconds,
)
from pipetransformer_contract.wire import Wire

MAX_MEMBERS = 8192
#: Of a condition, in characters. Whose words it passes on may say more: it is cut there.
MAX_CONDITION_MESSAGE = 32768
MAX_CONDITION_REASON = 1024


class ConditionType(StrEnum):
    """What conditions are about."""

    ADMITTED = "Admitted"  #: the job may have workers
    RUNNING = "Running"  #: a generation was confirmed, and its members train
    RESIZING = "Resizing"  #: another layout is being prepared or committed
    STALLED = "Stalled"  #: no step for `stallTimeoutSeconds`, or generation after generation breaks
    SUSPENDED = "Suspended"  #: `spec.suspend` is true, or the job is being deleted
    COMPLETE = "Complete"  #: the model is trained and durable
    FAILED = "Failed"  #: it will not be tried again


class Reason(StrEnum):
    """Reasons of conditions and of Kubernetes events."""

    # Admitted
    NO_QUEUE = "NoQueue"  #: no queue was named: admitted at once
    QUOTA_RESERVED = "QuotaReserved"  #: the queue admitted the job
    WAITING_FOR_QUOTA = "WaitingForQuota"  #: the queue has not admitted the job, or one more pipeline, yet
    QUOTA_LOST = "QuotaLost"  #: the queue takes quota back
    QUEUE_UNAVAILABLE = "QueueUnavailable"  #: nothing is known of the queue
    NAME_CONFLICT = "NameConflict"  #: a pod with a worker's name belongs to someone else
    INVALID_SPEC = "InvalidSpec"
    # Running
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    TRAINING = "Training"
    CREATION_REFUSED = "CreationRefused"  #: the cluster does not take the workers' pods
    DELETION_REFUSED = "DeletionRefused"  #: the cluster keeps pods that the job gives back; of Suspended, too
    RECOVERING = "Recovering"  #: members were lost and the rest is too few for any legal layout
    NO_LEGAL_START = "NoLegalStart"  #: no layout to start with lies within the bounds of the spec
    FINISHED = "Finished"
    # Resizing: preparing, committing, cleaning
    PREPARING = "Preparing"  #: waits until each member of the next generation is ready
    COMMITTING = "Committing"  #: published; waits until the leader confirms
    RELEASING = "Releasing"  #: confirmed; waits for a durable checkpoint and for the leavers' end
    SETTLED = "Settled"
    # Why a preparation was cancelled, or a start put off (CreationRefused as well)
    UNSCHEDULABLE = "Unschedulable"  #: no node takes one of the workers
    IMAGE_PULL = "ImagePull"  #: the image of a worker cannot be pulled
    GAVE_WAY = "GaveWay"  #: another waiting job can start on what this one, which cannot, would hold
    NOT_READY = "NotReady"  #: a worker runs and did not say that it is ready
    WORKER_FAILED = "WorkerFailed"  #: a worker ended before it was ready
    NOT_COMMITTED = "NotCommitted"  #: published, and the members could not commit it
    # Stalled
    PROGRESSING = "Progressing"
    NO_PROGRESS = "NoProgress"
    NOT_HEARD = "NotHeard"  #: no member reaches the operator
    GROUP_BROKEN = "GroupBroken"  #: all members live, and they lost their connections; of Running, too
    # Suspended
    SUSPENDED_BY_USER = "SuspendedByUser"
    RESUMED = "Resumed"
    BEING_DELETED = "BeingDeleted"  #: a finalizer of others keeps it for now
    # Complete and Failed
    TRAINING_SUCCEEDED = "TrainingSucceeded"
    TRAINING_FAILED = "TrainingFailed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"  #: `activeDeadlineSeconds`
    USER_ERROR = "UserError"  #: the trainer refused the spec, the model or the data
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    # Events only
    WORKERS_CREATED = "WorkersCreated"
    WORKERS_DELETED = "WorkersDeleted"
    GENERATION_PUBLISHED = "GenerationPublished"
    GENERATION_CONFIRMED = "GenerationConfirmed"
    LAYERS_FROZEN = "LayersFrozen"
    LAYERS_UNFROZEN = "LayersUnfrozen"
    WORKER_LOST = "WorkerLost"
    NODE_AVOIDED = "NodeAvoided"  #: accelerators failed there more than once
    NODE_LOST = "NodeLost"  #: with members on it; no failure of the job
    WORKERS_DRAINING = "WorkersDraining"  #: their nodes are cordoned; they are replaced first
    WORKER_DRAINED = "WorkerDrained"  #: deleted, evicted or preempted by someone else; no failure of the job
    SHARE_CHANGED = "ShareChanged"
    OUT_OF_MEMORY = "OutOfMemory"  #: pipelines were packed into too little memory; of Failed, the longest are
    GPUS_RELEASED = "GPUsReleased"
    STEPS_LOST = "StepsLost"  #: steps that no checkpoint holds are trained again, or would be


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Wire):
    """As `metav1.Condition`. `last_transition_time` moves only when `status` does."""

    type: ConditionType = Field(description="What it is about.")
    status: ConditionStatus = Field(description="Whether it holds.")
    reason: str = Field(
        max_length=MAX_CONDITION_REASON, description="Why, in one word: docs/operations.md has a row for each."
    )
    message: str = Field(
        default="", max_length=MAX_CONDITION_MESSAGE, description="Why, in the words of whoever knows."
    )
    last_transition_time: datetime = Field(description="When `status` last changed.")
    observed_generation: Count = Field(default=0, description="`metadata.generation` that was looked at.")


class State(StrEnum):
    """One word for the printer column, derived from the conditions and never read back."""

    PENDING = "Pending"  #: not admitted yet
    STARTING = "Starting"  #: its first workers are awaited, or replacements without which it cannot train
    RUNNING = "Running"  #: it trains
    RESIZING = "Resizing"  #: it trains while another layout is prepared, or changes to it
    STALLED = "Stalled"  #: no step was made for too long
    UNHEARD = "Unheard"  #: no member is heard: it may train, or not
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ResizePhase(StrEnum):
    """Where a change of layout stands."""

    PREPARE = "Prepare"  #: workers are created and warm up; the old layout trains, and it can be cancelled
    COMMIT = "Commit"  #: published; the trainers' vote decides
    CLEAN = "Clean"  #: confirmed; leavers are given back once a checkpoint is durable


class LayoutSize(Wire):
    """A layout as it stands in the status."""

    stages: Positive = Field(description="Workers a pipeline (K).")
    pipelines: Positive = Field(description="Data-parallel width (R).")

    @property
    def layout(self) -> Layout:
        return Layout(self.stages, self.pipelines)

    @classmethod
    def of(cls, layout: Layout) -> "LayoutSize":
        return cls(stages=layout.stages, pipelines=layout.pipelines)


class Resize(Wire):
    """The one change of layout that is under way.

    `from` is absent at a start. Past `deadline` a preparation is cancelled; a published generation that its members say
    they could not commit is followed by one with the old layout. Nothing waits for a deadline while it is cleaned up.
    """

    from_: LayoutSize | None = Field(default=None, alias="from")
    to: LayoutSize
    phase: ResizePhase
    reason: ResizeReason
    start_time: datetime = Field(description="When its present phase began.")
    deadline: datetime | None = Field(default=None, description="When it is cancelled or taken back.")
    replacements: Count = Field(
        default=0, description="Times in a row that workers of a start ended before they joined; each doubles the wait."
    )
    renewals: Count = Field(
        default=0, description="Times that it had all its time anew, for workers that ended before they joined."
    )
    trouble_time: datetime | None = Field(
        default=None,
        description="Since when a worker of a start is not placed, or a container cannot be started; absent while all"
        " are.",
    )


class TooShort(Wire):
    """Pipelines that their workers' memory did not hold: longer ones are taken until more blocks are frozen."""

    stages: Positive = Field(description="Workers a pipeline (K), at most.")
    boundary: Count = Field(description="Frozen blocks, at most.")

    def rules_out(self, stages: int, boundary: int) -> bool:
        """Whether pipelines of so many stages with so many frozen blocks would not fit either."""
        return stages <= self.stages and boundary <= self.boundary


class LastReport(Report):
    """The newest report that was worth a write, and when it was folded in."""

    time: datetime = Field(description="When it was folded in.")


class Share(Wire):
    """Workers that the job may have while others want some, as computed for the layout of that generation."""

    workers: Count = Field(description="As many as it may have.")
    layout_generation: Count = Field(description="Generation for which it holds.")
    yields: bool = Field(
        default=False,
        description="A claimed pipeline is for pods of other owners that wait: obeyed whatever `onPack` says.",
    )
    node: str = Field(default="", description="Where a pod of another owner would fit: claimed workers there go first.")


class QuotaRequest(Wire):
    """One request to the job's queue: the first is for the starting size, each other for workers beyond it, or for
    those that take the places of cordoned or lost ones.

    A request's size is fixed. Quota that is not needed any more is returned worker by worker, and never comes back.
    """

    name: Name = Field(description="Of the queue's object.")
    queue: Name = Field(description="That is asked.")
    workers: Positive = Field(description="That it is for.")
    returned: Count = Field(default=0, description="Of workers: those whose quota was given back.")
    own: bool = Field(
        default=False,
        description="As the first, for workers of the starting size: in the places of cordoned ones, or of lost ones.",
    )
    admitted: bool = Field(default=False, description="The queue said yes, and the answer was used.")
    worker_ids: list[Count] = Field(
        default_factory=list, max_length=MAX_MEMBERS, description="Workers that use the quota; until their pod is gone."
    )

    @property
    def granted(self) -> int:
        """Workers that it is for, less what was given back."""
        return self.workers - self.returned

    @property
    def free(self) -> int:
        """Workers that it allows besides those that use it."""
        return self.granted - len(self.worker_ids)


class Drain(Wire):
    """Workers whose nodes were cordoned at a time: they are replaced first, then evictions pass."""

    time: datetime = Field(description="When it was seen.")
    worker_ids: list[Count] = Field(max_length=MAX_MEMBERS, description="Those that are still there.")


class Stop(Wire):
    """The members were told to leave a checkpoint and end; it is never taken back."""

    time: datetime = Field(description="When that was decided.")
    saved_step: Count = Field(
        default=0, description="Committed steps of the checkpoint that the first members to end had left."
    )


class NodeSilence(Wire):
    """A node on which members fell silent, until the cluster says whether it is lost."""

    node: Name = Field(description="Its name.")
    time: datetime = Field(description="When the first of them was found silent.")
    newest: datetime = Field(description="When the last one was.")
    words: str = Field(max_length=1024, description="Who fell silent first, and for how long.")
    lost: bool = Field(default=False, description="The node is lost: that is no failure of the job.")
    failure_step: Count | None = Field(
        default=None, description="Step at which it counts as a failure, because the node lives."
    )

    @property
    def decided(self) -> bool:
        """Whether it is known what it was."""
        return self.lost or self.failure_step is not None


class Gpus(Wire):
    """`held` and `saved` count workers now; `released` those since the start, and never falls."""

    held: Count = Field(default=0, description="Workers whose pod is not gone.")
    released: Count = Field(default=0, description="Workers given back since the start.")
    saved: Count = Field(
        default=0,
        description="Workers that shorter pipelines of the starting width do without, and that are not held.",
    )


class JobStatus(Wire):
    """What the operator knows and decided; only it writes here. Fields without a value are left out of the object."""

    state: State = State.PENDING
    conditions: list[Condition] = Field(default_factory=list, max_length=16, description="See docs/operations.md.")
    generation: Generation | None = None
    resize: Resize | None = None
    last_report: LastReport | None = None
    checkpoint: DurableCheckpoint | None = None
    worker_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Workers that ought to exist; written before they are created.",
    )
    leaving_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Workers that left a generation and wait for a durable checkpoint before they are given back.",
    )
    releasing_ids: list[Count] = Field(
        default_factory=list, max_length=MAX_MEMBERS, description="Workers given back whose pod is not gone yet."
    )
    surplus_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Of `leavingIds`, those that a smaller layout left over: released once they are gone.",
    )
    claimed_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Workers beyond the job's starting size: they have the lower priority, and go first.",
    )
    layout_generation: Count = Field(default=0, description="Highest generation ever published; it only rises.")
    next_worker_id: Count = Field(default=0, description="Ids are never used twice.")
    num_shards: Positive | None = Field(
        default=None,
        description="Most pipelines until the job starts again: what its spec allowed when it started, and no more than"
        " shards in the order of the data that it goes on in.",
    )
    initial_workers: Count = Field(
        default=0, description="Workers of a start that no ceiling limits: what the savings are measured against."
    )
    workers: Count = Field(default=0, description="Pods that are not gone; replicas of the scale subresource.")
    selector: str = Field(
        default="", max_length=1024, description="Label selector of the pods, for the scale subresource."
    )
    share: Share | None = None
    quota_requests: list[QuotaRequest] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="What the job asked its queue for; written before it is asked. Empty without a queue.",
    )
    next_request_id: Count = Field(default=0, description="Ids are never used twice.")
    priority: int = Field(
        default=0,
        ge=-(2**31),
        lt=2**31,
        description="Of its pods as last seen, for a start that was put off.",
    )
    gpus: Gpus = Field(default_factory=Gpus)
    gpu_seconds_saved: Seconds = Field(
        default=0.0, description="By packing, as of `gpuSecondsTime`; since then by `gpus.saved` workers."
    )
    gpu_seconds_time: datetime | None = Field(default=None, description="Of `gpuSecondsSaved`.")
    frozen: str = Field(default="", max_length=32, description="Frozen blocks of all blocks, such as 6/12.")
    start_time: datetime | None = Field(
        default=None, description="When it first asked for its workers, since it was resumed last."
    )
    stop: Stop | None = None
    unsettled_step: Count | None = Field(
        default=None,
        description="Step that was reached when others took all workers away: these may have left a checkpoint. The"
        " next start shows how many steps are lost.",
    )
    completion_time: datetime | None = Field(default=None, description="When it ended, one way or the other.")
    failures: Count = Field(
        default=0, description="Failures since the job was created, those included that are forgotten by now."
    )
    failure_steps: list[Count] = Field(
        default_factory=list,
        max_length=10001,
        description="Failures that count against `runPolicy.backoffLimit`, each by the committed step at which it"
        " happened; forgotten after `forgetFailuresAfterSteps` more.",
    )
    node_losses: Count = Field(
        default=0, description="Nodes that were lost with members of the job: each counts once, and is no failure."
    )
    silences: list[NodeSilence] = Field(
        default_factory=list, max_length=MAX_MEMBERS, description="Nodes on which members fell silent lately."
    )
    resize_failures: Count = Field(
        default=0, description="Preparations cancelled in a row; each doubles the wait for the next."
    )
    slow_starts: Count = Field(
        default=0,
        description="Starts in a row put off although all workers had a node; each doubles the time of the next.",
    )
    next_resize_time: datetime | None = Field(default=None, description="No resize is prepared before.")
    waits_for_nodes_since: datetime | None = Field(
        default=None,
        description="Since when a job that does not train sleeps because it found no nodes: accelerators that are"
        " released later, or a new node, wake it before `nextResizeTime`.",
    )
    not_committed: LayoutSize | None = Field(
        default=None, description="Layout that the members could not commit; not tried before `nextResizeTime`."
    )
    too_short: TooShort | None = None
    grants_in_vain: Count = Field(
        default=0, description="Times in a row that other jobs made room and this one found no node all the same."
    )
    next_grant_time: datetime | None = Field(
        default=None, description="No other job makes room for this one before: what it was granted last was in vain."
    )
    drain_deadline: datetime | None = Field(
        default=None, description="Until then workers on cordoned nodes are replaced; then evictions pass."
    )
    drains: list[Drain] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Workers on cordoned nodes, by when that was seen; oldest first.",
    )
    observed_generation: Count = Field(default=0, description="`metadata.generation` that was looked at.")

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of that type, or None when it was never set."""
        return next((condition for condition in self.conditions if condition.type is kind), None)

    def is_true(self, kind: ConditionType) -> bool:
        """Whether the condition of that type is True."""
        condition = self.condition(kind)
        return condition is not None and condition.status is ConditionStatus.TRUE

    def says_the_same_as(self, other: "JobStatus") -> bool:
        """Whether both differ in nothing but what changes with every pod while a job starts: words of conditions, and
        how many pods there are before anything trains."""
        return self._without_words() == other._without_words()

    def _without_words(self) -> "JobStatus":
        conditions = [one.model_copy(update={"reason": "", "message": ""}) for one in self.conditions]
        status = self.model_copy(update={"conditions": conditions})
        if self.generation is None:
            status = status.model_copy(update={"workers": 0, "gpus": self.gpus.model_copy(update={"held": 0})})
        return status

    @property
    def own_requests(self) -> list[QuotaRequest]:
        """Those for workers of the starting size; the others are claims."""
        return [*self.quota_requests[:1], *(request for request in self.quota_requests[1:] if request.own)]

    @property
    def finished(self) -> bool:
        """Whether the job has ended, one way or the other."""
        return self.is_true(ConditionType.COMPLETE) or self.is_true(ConditionType.FAILED)
