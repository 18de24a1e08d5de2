"""The status of a `PipeTrainingJob`: all that the operator remembers about a job.

The operator writes each decision here before it acts on it. If it dies between two writes, the next operator reads here
what was decided. The operator observes everything else again.
"""

from collections.abc import Set
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
#: Maximum length of a condition's message, in characters. Longer messages are cut.
MAX_CONDITION_MESSAGE = 32768
MAX_CONDITION_REASON = 1024


class ConditionType(StrEnum):
    """The types of conditions."""

    ADMITTED = "Admitted"  #: the job may have workers
    RUNNING = "Running"  #: the leader confirmed a generation, and its members train
    RESIZING = "Resizing"  #: another layout is being prepared or committed
    STALLED = "Stalled"  #: no step for `stallTimeoutSeconds`, or several generations in a row break
    UNSAVED = "Unsaved"  #: the storage does not take the job's checkpoint; the job trains on
    SUSPENDED = "Suspended"  #: `spec.suspend` is true, or the job is being deleted
    COMPLETE = "Complete"  #: the model is trained and durable
    FAILED = "Failed"  #: the operator does not try the job again


class Reason(StrEnum):
    """Reasons of conditions and of Kubernetes events."""

    # Admitted
    NO_QUEUE = "NoQueue"  #: the job names no queue: admitted at once
    QUOTA_RESERVED = "QuotaReserved"  #: the queue admitted the job
    WAITING_FOR_QUOTA = "WaitingForQuota"  #: the queue has not yet admitted the job, or one more pipeline
    QUOTA_LOST = "QuotaLost"  #: the queue takes quota back
    QUEUE_UNAVAILABLE = "QueueUnavailable"  #: the operator knows nothing about the queue
    NAME_CONFLICT = "NameConflict"  #: a pod of another owner has a worker's name
    INVALID_SPEC = "InvalidSpec"
    # Running
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    TRAINING = "Training"
    CREATION_REFUSED = "CreationRefused"  #: the cluster refuses to create the workers' pods
    DELETION_REFUSED = "DeletionRefused"  #: the cluster refuses to delete released pods; also a reason of Suspended
    RECOVERING = "Recovering"  #: members were lost, and too few are left for any legal layout
    NO_LEGAL_START = "NoLegalStart"  #: no starting layout is within the bounds of the spec
    FINISHED = "Finished"
    # Resizing: preparing, committing, cleaning
    PREPARING = "Preparing"  #: waits until all members of the next generation are ready
    COMMITTING = "Committing"  #: published; waits until the leader confirms
    RELEASING = "Releasing"  #: confirmed; waits for a durable checkpoint and until the leavers have ended
    WAITING_FOR_LEVEL = "WaitingForLevel"  #: makes no step, because a larger model begins and needs more workers
    SETTLED = "Settled"
    # Why a preparation was cancelled, or a start postponed (CreationRefused can be the reason, too)
    UNSCHEDULABLE = "Unschedulable"  #: at least one worker fits on no node
    IMAGE_PULL = "ImagePull"  #: the image of a worker cannot be pulled
    GAVE_WAY = "GaveWay"  #: this job cannot start, and another waiting job can start with the nodes it would hold
    NOT_READY = "NotReady"  #: a worker runs but did not report that it is ready
    WORKER_FAILED = "WorkerFailed"  #: a worker ended before it was ready
    NOT_COMMITTED = "NotCommitted"  #: the generation was published, but its members could not commit it
    # Stalled
    PROGRESSING = "Progressing"
    NO_PROGRESS = "NoProgress"
    NOT_HEARD = "NotHeard"  #: no member reaches the operator
    GROUP_BROKEN = "GroupBroken"  #: all members live but lost their connections; also a reason of Running
    # Unsaved
    CHECKPOINT_FAILS = "CheckpointFails"  #: the storage is away, full or refuses; the workers try again
    NOTHING_WAITS = "NothingWaits"  #: no checkpoint waits for the storage
    # Suspended
    SUSPENDED_BY_USER = "SuspendedByUser"
    RESUMED = "Resumed"
    BEING_DELETED = "BeingDeleted"  #: a finalizer of another owner still keeps the job
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
    NODE_LOST = "NodeLost"  #: members ran on it; not a failure of the job
    WORKERS_DRAINING = "WorkersDraining"  #: their nodes are cordoned; the operator replaces them before an eviction
    WORKER_DRAINED = "WorkerDrained"  #: taken away, but not by the operator: deleted, evicted, preempted; not a failure
    SHARE_CHANGED = "ShareChanged"
    OUT_OF_MEMORY = "OutOfMemory"  #: packed pipelines need too much memory; of Failed: the longest pipelines do
    GPUS_RELEASED = "GPUsReleased"
    STEPS_LOST = "StepsLost"  #: no checkpoint holds these steps; they must be trained again


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Wire):
    """Like `metav1.Condition`. `last_transition_time` changes only when `status` changes."""

    type: ConditionType = Field(description="Type of the condition.")
    status: ConditionStatus = Field(description="Whether the condition holds.")
    reason: str = Field(
        max_length=MAX_CONDITION_REASON, description="Reason, in one word. docs/operations.md has a row for each."
    )
    message: str = Field(default="", max_length=MAX_CONDITION_MESSAGE, description="Explanation of the reason.")
    last_transition_time: datetime = Field(description="When `status` last changed.")
    observed_generation: Count = Field(default=0, description="`metadata.generation` that the condition is about.")


class State(StrEnum):
    """One word for the printer column. It is derived from the conditions, and the operator never reads it back."""

    PENDING = "Pending"  #: not admitted yet
    STARTING = "Starting"  #: waits for its first workers, or for replacements that it needs to train
    RUNNING = "Running"  #: it trains
    RESIZING = "Resizing"  #: it trains while another layout is prepared, or it changes to that layout
    STALLED = "Stalled"  #: no step was made for too long
    UNHEARD = "Unheard"  #: no member reaches the operator: the job may or may not train
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ResizePhase(StrEnum):
    """Phase of a resize."""

    PREPARE = "Prepare"  #: new workers start and warm up while the old layout trains; the resize can be cancelled
    COMMIT = "Commit"  #: the generation is published; the trainers' vote decides
    CLEAN = "Clean"  #: the generation is confirmed; leavers are released once a checkpoint is durable


class LayoutSize(Wire):
    """A layout, as written in the status."""

    stages: Positive = Field(description="Workers per pipeline (K).")
    pipelines: Positive = Field(description="Data-parallel width (R).")

    @property
    def layout(self) -> Layout:
        return Layout(self.stages, self.pipelines)

    @classmethod
    def of(cls, layout: Layout) -> "LayoutSize":
        return cls(stages=layout.stages, pipelines=layout.pipelines)


class Resize(Wire):
    """The one resize in progress.

    `from` is absent at a start. After `deadline` the operator cancels a preparation. If the members say that they could
    not commit a published generation, it then publishes one with the old layout. The last phase has no deadline.
    """

    from_: LayoutSize | None = Field(default=None, alias="from")
    to: LayoutSize
    phase: ResizePhase
    reason: ResizeReason
    start_time: datetime = Field(description="When the present phase began.")
    deadline: datetime | None = Field(default=None, description="When the resize is cancelled or undone.")
    replacements: Count = Field(
        default=0, description="Times in a row that workers of a start ended before they joined. Each doubles the wait."
    )
    renewals: Count = Field(
        default=0, description="Times that the deadline was restarted because workers ended before they joined."
    )
    trouble_time: datetime | None = Field(
        default=None,
        description="Since when a worker of a start has no node, or a container of it cannot be started. Absent if"
        " neither is the case.",
    )


class TooShort(Wire):
    """Pipelines that did not fit in their workers' memory. The job uses longer ones until more layers are frozen."""

    stages: Positive = Field(description="Pipelines of at most this many workers (K) are ruled out.")
    boundary: Count = Field(description="They are ruled out while at most this many layers are frozen.")

    def rules_out(self, stages: int, boundary: int) -> bool:
        """Whether pipelines of `stages` stages with `boundary` frozen layers would not fit either."""
        return stages <= self.stages and boundary <= self.boundary


class LastReport(Report):
    """The newest report that the operator wrote to the status, and when it did."""

    time: datetime = Field(description="When the operator wrote it to the status.")


class Share(Wire):
    """Workers that the job may have while other jobs want some, computed for the layout of `layout_generation`."""

    workers: Count = Field(description="Maximum number of workers of the job.")
    layout_generation: Count = Field(description="Generation that the share was computed for.")
    for_others: bool = Field(
        default=False,
        description="The job must release a claimed pipeline for pending pods of other owners, whatever `onPack` says.",
    )
    node: str = Field(
        default="", description="Node where a pod of another owner would fit. Claimed workers on it are released first."
    )


class QuotaRequest(Wire):
    """One request to the job's queue.

    The first request is for the starting size. Each later one is for workers beyond it, or for replacements of workers
    on cordoned or lost nodes. A request's size is fixed. The job returns unneeded quota worker by worker, for good.
    """

    name: Name = Field(description="Name of the queue's object.")
    queue: Name = Field(description="Queue that the job asks.")
    workers: Positive = Field(description="Number of workers that the request is for.")
    returned: Count = Field(default=0, description="Number of workers whose quota was returned.")
    own: bool = Field(
        default=False,
        description="True for replacements of cordoned or lost workers of the starting size.",
    )
    admitted: bool = Field(default=False, description="The queue admitted the request, and the answer was used.")
    worker_ids: list[Count] = Field(
        default_factory=list, max_length=MAX_MEMBERS, description="Workers that use the quota, until their pod is gone."
    )

    @property
    def granted(self) -> int:
        """Workers that the request is for, without those whose quota was returned."""
        return self.workers - self.returned

    @property
    def free(self) -> int:
        """Workers that the quota still allows, in addition to those that use it."""
        return self.granted - len(self.worker_ids)

    def less(self, workers: int) -> "QuotaRequest":
        """The request after the job returned the quota of that many workers."""
        return self.model_copy(update={"returned": self.returned + workers})


class Drain(Wire):
    """Workers whose nodes were cordoned at the same time. They are replaced before evictions may pass."""

    time: datetime = Field(description="When the operator saw the cordon.")
    worker_ids: list[Count] = Field(max_length=MAX_MEMBERS, description="Workers that are still on these nodes.")

    def among(self, ids: Set[int]) -> "Drain":
        """The drain without workers that are not among `ids`."""
        return self.model_copy(update={"worker_ids": [key for key in self.worker_ids if key in ids]})

    def joined_by(self, later: "Drain") -> "Drain":
        """The drain with the workers of a later one."""
        return self.model_copy(update={"worker_ids": [*self.worker_ids, *later.worker_ids]})


class Stop(Wire):
    """The operator told the members to write a checkpoint and exit. It never takes this back."""

    time: datetime = Field(description="When the operator decided it.")
    saved_step: Count = Field(
        default=0, description="Committed steps of the checkpoint that the first members to exit had written."
    )


class NodeSilence(Wire):
    """A node on which members fell silent. The cluster says later whether the node is lost."""

    node: Name = Field(description="Name of the node.")
    time: datetime = Field(description="When the operator found the first member silent.")
    newest: datetime = Field(description="When the operator found the last member silent.")
    words: str = Field(max_length=1024, description="Which member fell silent first, and for how long.")
    lost: bool = Field(default=False, description="The node is lost. This is not a failure of the job.")
    failure_step: Count | None = Field(
        default=None,
        description="Step at which the silence counts as a failure of the job, because the node is not lost.",
    )

    @property
    def decided(self) -> bool:
        """Whether the cause of the silence is known."""
        return self.lost or self.failure_step is not None


class Gpus(Wire):
    """`held` and `saved` count workers now. `released` counts workers since the start and never falls."""

    held: Count = Field(default=0, description="Workers whose pod is not gone.")
    released: Count = Field(default=0, description="Workers released since the start.")
    saved: Count = Field(
        default=0,
        description="Workers that the starting width no longer needs with shorter pipelines, and that are not held.",
    )


class JobStatus(Wire):
    """State of the job, and the operator's decisions. Only the operator writes it. Absent fields have no value."""

    state: State = State.PENDING
    conditions: list[Condition] = Field(
        default_factory=list, max_length=16, description="Conditions of the job. docs/operations.md explains them."
    )
    generation: Generation | None = None
    resize: Resize | None = None
    last_report: LastReport | None = None
    checkpoint: DurableCheckpoint | None = None
    # Lists of numbers, not one list of objects: for 4,096 workers that is 0.1 MB of etcd's 1.5 MiB, and not 0.4 MB.
    worker_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Workers that should exist. Written before they are created.",
    )
    leaving_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Workers that left a generation. They are released once a checkpoint is durable.",
    )
    releasing_ids: list[Count] = Field(
        default_factory=list, max_length=MAX_MEMBERS, description="Released workers whose pod is not gone yet."
    )
    surplus_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Workers in `leavingIds` that a smaller layout no longer needs. They count as released once they"
        " are gone.",
    )
    claimed_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Workers beyond the job's starting size. They have the lower priority and are released first.",
    )
    layout_generation: Count = Field(default=0, description="Highest generation ever published. It never falls.")
    next_worker_id: Count = Field(default=0, description="Id of the next worker. Ids are never reused.")
    num_shards: Positive | None = Field(
        default=None,
        description="Maximum number of pipelines until the job starts again. It is what the spec allowed at the start,"
        " and at most the number of shards in the data order that the job resumes.",
    )
    initial_workers: Count = Field(
        default=0, description="Workers of a start that no ceiling limits. Savings are measured against this number."
    )
    workers: Count = Field(
        default=0, description="Pods that are not gone. The scale subresource shows them as replicas."
    )
    selector: str = Field(
        default="", max_length=1024, description="Label selector of the pods, for the scale subresource."
    )
    share: Share | None = None
    quota_requests: list[QuotaRequest] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Requests to the job's queue. Written before the queue is asked; empty without a queue.",
    )
    next_request_id: Count = Field(default=0, description="Id of the next request. Ids are never reused.")
    priority: int = Field(
        default=0,
        ge=-(2**31),
        lt=2**31,
        description="Priority of the job's pods when last seen. Used for a start that was postponed.",
    )
    gpus: Gpus = Field(default_factory=Gpus)
    gpu_seconds_saved: Seconds = Field(
        default=0.0,
        description="GPU-seconds that packing saved up to `gpuSecondsTime`. Since then `gpus.saved` workers add to it.",
    )
    gpu_seconds_time: datetime | None = Field(default=None, description="Time up to which `gpuSecondsSaved` counts.")
    frozen: str = Field(default="", max_length=32, description="Frozen layers of all layers, such as 6/12.")
    start_time: datetime | None = Field(
        default=None, description="When the job first asked for its workers since it was last resumed."
    )
    stop: Stop | None = None
    unsettled_step: Count | None = Field(
        default=None,
        description="Step reached when all workers were taken away, but not by the operator. They may have written a"
        " checkpoint. The next start shows how many steps are lost.",
    )
    completion_time: datetime | None = Field(default=None, description="When the job completed or failed.")
    failures: Count = Field(
        default=0, description="Failures since the job was created, including those that no longer count."
    )
    failure_steps: list[Count] = Field(
        default_factory=list,
        max_length=10001,
        description="Failures that count against `runPolicy.backoffLimit`, each as the committed step at which it"
        " happened. A failure is forgotten after `forgetFailuresAfterSteps` more steps.",
    )
    node_losses: Count = Field(
        default=0, description="Nodes that were lost with members of the job. Each counts once and is not a failure."
    )
    silences: list[NodeSilence] = Field(
        default_factory=list, max_length=MAX_MEMBERS, description="Nodes on which members fell silent lately."
    )
    resize_failures: Count = Field(
        default=0,
        description="Resizes in a row that were cancelled during preparation. Each doubles the wait for the next.",
    )
    slow_starts: Count = Field(
        default=0,
        description="Starts in a row that were postponed although all workers had a node. Each doubles the next one's"
        " time.",
    )
    next_resize_time: datetime | None = Field(default=None, description="No resize is prepared before this time.")
    waits_for_nodes_since: datetime | None = Field(
        default=None,
        description="Since when a job that does not train sleeps because it found no nodes. Released accelerators or a"
        " new node wake it before `nextResizeTime`.",
    )
    not_committed: LayoutSize | None = Field(
        default=None,
        description="Layout that the members could not commit. It is not tried again before `nextResizeTime`.",
    )
    too_short: TooShort | None = None
    grants_in_vain: Count = Field(
        default=0, description="Times in a row that other jobs made room and this job still found no node."
    )
    next_grant_time: datetime | None = Field(
        default=None,
        description="No other job makes room for this one before this time. It found no node in such room, or released"
        " workers for another job.",
    )
    drain_deadline: datetime | None = Field(
        default=None, description="Workers on cordoned nodes are replaced until this time. Then evictions pass."
    )
    drains: list[Drain] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Workers on cordoned nodes, by when the operator saw the cordon. The oldest comes first.",
    )
    observed_generation: Count = Field(default=0, description="`metadata.generation` that the status is about.")

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of that type, or None if it was never set."""
        return next((condition for condition in self.conditions if condition.type is kind), None)

    def reason(self, kind: ConditionType) -> str:
        """The reason of the condition of that type; empty if it was never set."""
        condition = self.condition(kind)
        return condition.reason if condition is not None else ""

    def is_true(self, kind: ConditionType) -> bool:
        """Whether the condition of that type is True."""
        condition = self.condition(kind)
        return condition is not None and condition.status is ConditionStatus.TRUE

    def says_the_same_as(self, other: "JobStatus") -> bool:
        """Whether both differ at most in what changes with every pod while a job starts.

        That is the reasons and messages of conditions, and the number of pods before training begins."""
        return self._without_words() == other._without_words()

    def _without_words(self) -> "JobStatus":
        conditions = [one.model_copy(update={"reason": "", "message": ""}) for one in self.conditions]
        status = self.model_copy(update={"conditions": conditions})
        if self.generation is None:
            status = status.model_copy(update={"workers": 0, "gpus": self.gpus.model_copy(update={"held": 0})})
        return status

    @property
    def own_requests(self) -> list[QuotaRequest]:
        """Requests for workers of the starting size. All other requests are claims."""
        return [*self.quota_requests[:1], *(request for request in self.quota_requests[1:] if request.own)]

    @property
    def finished(self) -> bool:
        """Whether the job completed or failed."""
        return self.is_true(ConditionType.COMPLETE) or self.is_true(ConditionType.FAILED)
