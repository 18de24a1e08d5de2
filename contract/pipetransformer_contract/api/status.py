"""The status of a `PipeTrainingJob`: all that the operator remembers about a job.

The operator writes each decision to the status before it acts on it. If the operator dies, the next one reads from the
status what was decided, and observes everything else again.
"""

from collections.abc import Set
from datetime import datetime
from enum import StrEnum

from pydantic import Field

from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import (
    MAX_MEMBERS,
    MAX_TOKEN,
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

#: Maximum length of a condition's message, in characters. Longer messages are cut.
MAX_CONDITION_MESSAGE = 32768
MAX_CONDITION_REASON = 1024


class ConditionType(StrEnum):
    """The types of conditions."""

    ADMITTED = "Admitted"  #: the job may have workers
    RUNNING = "Running"  #: the leader has confirmed a generation, and its members train
    RESIZING = "Resizing"  #: another layout is being prepared or committed
    STALLED = "Stalled"  #: no step was made for `stallTimeoutSeconds`, or several generations in a row broke
    UNSAVED = "Unsaved"  #: the job's checkpoint cannot be written to the storage; the job continues to train
    SUSPENDED = "Suspended"  #: `spec.suspend` is true, or the job is being deleted
    COMPLETE = "Complete"  #: the model is trained and durable
    FAILED = "Failed"  #: the job failed, and the operator does not start it again


class Reason(StrEnum):
    """Reasons of conditions and of Kubernetes events."""

    # Admitted
    NO_QUEUE = "NoQueue"  #: the job names no queue, so it is admitted at once
    QUOTA_RESERVED = "QuotaReserved"  #: the queue admitted the job
    WAITING_FOR_QUOTA = "WaitingForQuota"  #: the queue has not yet admitted the job, or one more pipeline
    QUOTA_LOST = "QuotaLost"  #: the queue takes quota back from the job
    QUEUE_UNAVAILABLE = "QueueUnavailable"  #: the operator knows nothing about the queue
    NAME_CONFLICT = "NameConflict"  #: a pod of another owner has the name that a worker's pod would have
    INVALID_SPEC = "InvalidSpec"
    # Running
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    TRAINING = "Training"
    CREATION_REFUSED = "CreationRefused"  #: the cluster refuses the workers' pods, or what protects them
    DELETION_REFUSED = "DeletionRefused"  #: the cluster refuses to delete released pods; also a reason of Suspended
    RECOVERING = "Recovering"  #: members were lost, and too few are left to form a legal layout
    NO_LEGAL_START = "NoLegalStart"  #: no starting layout is within the bounds of the spec
    FINISHED = "Finished"
    # Resizing: preparing, committing, cleaning
    PREPARING = "Preparing"  #: the operator waits until all members of the next generation are ready
    COMMITTING = "Committing"  #: the generation is published; the operator waits until the leader confirms it
    RELEASING = "Releasing"  #: it is confirmed; the operator waits for a durable checkpoint and the end of leavers
    WAITING_FOR_LEVEL = "WaitingForLevel"  #: no step is made, because a larger model begins and needs more workers
    SETTLED = "Settled"  #: no resize is in progress
    # Why a preparation was cancelled, or a start postponed (CreationRefused can be the reason, too)
    UNSCHEDULABLE = "Unschedulable"  #: at least one worker fits on no node
    IMAGE_PULL = "ImagePull"  #: the image of a worker cannot be pulled
    GAVE_WAY = "GaveWay"  #: this job cannot start, and leaves its nodes to another waiting job that can start on them
    NOT_READY = "NotReady"  #: a worker runs but did not report that it is ready
    WORKER_FAILED = "WorkerFailed"  #: a worker ended before it was ready
    NOT_COMMITTED = "NotCommitted"  #: the generation was published, but its members could not commit it
    # Stalled
    PROGRESSING = "Progressing"
    NO_PROGRESS = "NoProgress"
    NOT_HEARD = "NotHeard"  #: no member reaches the operator
    GROUP_BROKEN = "GroupBroken"  #: all members live, but they lost their connections; also a reason of Running
    # Unsaved
    CHECKPOINT_FAILS = "CheckpointFails"  #: the storage is unreachable, full or refuses access; the workers try again
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
    NODE_AVOIDED = "NodeAvoided"  #: accelerators of this node failed more than once
    NODE_LOST = "NodeLost"  #: a node with members was lost; this is not a failure of the job
    WORKERS_DRAINING = "WorkersDraining"  #: nodes of workers are cordoned; the operator replaces the workers
    WORKER_DRAINED = "WorkerDrained"  #: another actor deleted, evicted or preempted a worker; not a failure of the job
    SHARE_CHANGED = "ShareChanged"
    OUT_OF_MEMORY = "OutOfMemory"  #: pipelines need too much memory; with Failed, also the longest pipelines do
    GPUS_RELEASED = "GPUsReleased"
    CHECKPOINT_MADE = "CheckpointMade"  #: the one that a user asked for is durable
    CHECKPOINT_REFUSED = "CheckpointRefused"  #: a user asked for one, and none will be written
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
        max_length=MAX_CONDITION_REASON, description="Reason, in one word. docs/operations.md explains each reason."
    )
    message: str = Field(default="", max_length=MAX_CONDITION_MESSAGE, description="Explanation of the reason.")
    last_transition_time: datetime = Field(description="When `status` last changed.")
    observed_generation: Count = Field(
        default=0, description="`metadata.generation` of the spec that the condition is based on."
    )


class State(StrEnum):
    """One word that sums up the conditions, for `kubectl get`. No rule reads it."""

    PENDING = "Pending"  #: not admitted yet
    STARTING = "Starting"  #: the job waits for its first workers, or for replacements without which it cannot train
    RUNNING = "Running"  #: the job trains
    RESIZING = "Resizing"  #: the job trains while another layout is prepared, or changes to that layout
    STALLED = "Stalled"  #: no step was made for too long
    UNHEARD = "Unheard"  #: no member reaches the operator: the job may or may not train
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ResizePhase(StrEnum):
    """Phase of a resize."""

    PREPARE = "Prepare"  #: new workers start and warm up while the old layout trains; the resize can be cancelled
    COMMIT = "Commit"  #: the generation is published; the workers vote on whether to commit it
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
    """The resize that is in progress. A job has at most one.

    If the deadline passes in the phase Prepare, new workers that are ready join if they make a larger layout possible.
    Otherwise the operator cancels the resize. If it passes in the phase Commit, and no member has committed, the
    operator publishes a generation with the old layout. The phase Clean has no deadline, and neither has a Commit after
    a failure or a drain, because there is no old layout to return to.
    """

    from_: LayoutSize | None = Field(default=None, alias="from", description="The layout before. Absent at a start.")
    to: LayoutSize = Field(description="The layout that the resize leads to.")
    phase: ResizePhase
    reason: ResizeReason
    start_time: datetime = Field(
        description="When the preparation began or last restarted; without one, when the generation was published."
    )
    deadline: datetime | None = Field(
        default=None, description="When the resize is cancelled or undone. Absent if it cannot be undone."
    )
    replacements: Count = Field(
        default=0,
        description="How many times in a row workers of a start ended before they joined. Each time doubles the wait.",
    )
    renewals: Count = Field(
        default=0,
        description="How many times the deadline was set again because workers ended before they joined.",
    )
    trouble_time: datetime | None = Field(
        default=None,
        description="At a start: since when a worker has no node, or a container of a worker cannot be started. Absent"
        " if neither is the case.",
    )


class TooShort(Wire):
    """Short pipelines that did not fit in their workers' memory. Until more layers are frozen, the job uses longer
    ones."""

    stages: Positive = Field(description="Pipelines with at most this many stages (K) are not used.")
    boundary: Count = Field(description="They are not used while at most this many layers are frozen.")

    def rules_out(self, stages: int, boundary: int) -> bool:
        """Whether pipelines of `stages` stages with `boundary` frozen layers would not fit either."""
        return stages <= self.stages and boundary <= self.boundary


class LastReport(Report):
    """The newest report of the leader that is in the status."""

    time: datetime = Field(description="When the operator wrote the report to the status.")


class Share(Wire):
    """How many workers the job may have, because other jobs or pods wait for accelerators."""

    workers: Count = Field(description="Maximum number of workers of the job.")
    layout_generation: Count = Field(description="Generation with whose layout the share was computed.")
    for_others: bool = Field(
        default=False,
        description="True: the job must release a claimed pipeline for pending pods of other owners, whatever `onPack`"
        " is.",
    )
    node: str = Field(
        default="",
        description="Node on which a pod of another owner would fit. Claimed workers on this node are released first.",
    )


class QuotaRequest(Wire):
    """A request for quota to the job's queue.

    The first request is for the starting size. Each later request is for workers beyond it, or for replacements of
    workers on cordoned or lost nodes. A request never grows. When the job no longer needs the quota of a worker, it
    returns it and does not get it back.
    """

    name: Name = Field(description="Name of the object in the cluster by which the queue is asked.")
    queue: Name = Field(description="Name of the queue.")
    workers: Positive = Field(description="Number of workers for which the job asks.")
    returned: Count = Field(default=0, description="Number of these workers whose quota the job has returned.")
    own: bool = Field(
        default=False,
        description="True: the request is for replacements of workers of the starting size, whose nodes are cordoned or"
        " lost.",
    )
    admitted: bool = Field(
        default=False, description="Whether the queue has admitted the request, and the job may create the workers."
    )
    worker_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Ids of the workers that use the quota. A worker uses it until its pod is gone.",
    )

    @property
    def granted(self) -> int:
        """Number of workers of the request without those whose quota was returned."""
        return self.workers - self.returned

    @property
    def free(self) -> int:
        """Number of workers that may still be created with this quota."""
        return self.granted - len(self.worker_ids)

    def less(self, workers: int) -> "QuotaRequest":
        """This request after the job has returned the quota of `workers` more workers."""
        return self.model_copy(update={"returned": self.returned + workers})


class Drain(Wire):
    """Workers whose nodes were cordoned at the same time. The operator replaces them."""

    time: datetime = Field(description="When the operator saw that the nodes were cordoned.")
    worker_ids: list[Count] = Field(
        max_length=MAX_MEMBERS, description="Ids of the workers that are still on these nodes."
    )

    def among(self, ids: Set[int]) -> "Drain":
        """This drain with only those workers that are in `ids`."""
        return self.model_copy(update={"worker_ids": [key for key in self.worker_ids if key in ids]})

    def joined_by(self, later: "Drain") -> "Drain":
        """This drain with the workers of a later drain added."""
        return self.model_copy(update={"worker_ids": [*self.worker_ids, *later.worker_ids]})


class Stop(Wire):
    """The operator's order to the members to write a checkpoint and exit. The operator never takes it back."""

    time: datetime = Field(description="When the operator gave the order.")
    saved_step: Count = Field(
        default=0,
        description="Number of committed steps in the checkpoint that was written before the first members exited.",
    )


class CheckpointRequest(Wire):
    """A checkpoint that a user asked for by the annotation `training.pipetransformer.io/checkpoint-now`."""

    token: str = Field(min_length=1, max_length=MAX_TOKEN, description="Value of the annotation.")
    time: datetime = Field(description="When the operator saw it.")
    step: Count | None = Field(
        default=None, description="Committed steps of the durable checkpoint that answers it. Absent before."
    )
    served_time: datetime | None = Field(default=None, description="When the operator heard that it is durable.")
    message: str = Field(default="", max_length=1024, description="Why no checkpoint answers it. Empty otherwise.")

    @property
    def is_open(self) -> bool:
        """Whether it has no answer yet."""
        return self.step is None and not self.message


class NodeSilence(Wire):
    """A node whose members send no more heartbeats. Kubernetes notices only later whether the node is lost."""

    node: Name = Field(description="Name of the node.")
    time: datetime = Field(description="When the operator found the first member of the node silent.")
    newest: datetime = Field(description="When the operator found the last member of the node silent.")
    words: str = Field(max_length=1024, description="Which member was silent first, and for how long, in words.")
    lost: bool = Field(default=False, description="Whether the node is lost. This is not a failure of the job.")
    failure_step: Count | None = Field(
        default=None,
        description="If the node is not lost, the silence is a failure of the job: the committed step at which it"
        " happened. Absent otherwise.",
    )

    @property
    def decided(self) -> bool:
        """Whether the cause of the silence is known."""
        return self.lost or self.failure_step is not None


class Gpus(Wire):
    """Numbers of workers. Each worker has one accelerator."""

    held: Count = Field(default=0, description="Number of workers whose pod still exists.")
    released: Count = Field(default=0, description="Number of workers released since the start. It never falls.")
    saved: Count = Field(
        default=0,
        description="Number of workers that the job saves now: the starting number of pipelines no longer needs them,"
        " because pipelines are shorter, and the job does not hold them.",
    )


class JobStatus(Wire):
    """State of the job, and the operator's decisions. Only the operator writes it."""

    state: State = State.PENDING
    conditions: list[Condition] = Field(
        default_factory=list, max_length=16, description="Conditions of the job. docs/operations.md explains them."
    )
    generation: Generation | None = None
    resize: Resize | None = None
    last_report: LastReport | None = None
    checkpoint: DurableCheckpoint | None = None
    checkpoint_time: datetime | None = Field(
        default=None, description="When the operator first heard that `checkpoint` is durable."
    )
    checkpoint_request: CheckpointRequest | None = None
    redone_steps: Count = Field(
        default=0, description="Steps that were committed and then trained again, since the job was created."
    )
    # Lists of numbers, not one list of objects: for 4,096 workers that is 0.1 MB of etcd's 1.5 MiB, and not 0.4 MB.
    worker_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Ids of the workers that should exist. The operator writes an id before it creates the pod.",
    )
    leaving_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Ids of workers that have left a generation. They are released once a checkpoint is durable.",
    )
    releasing_ids: list[Count] = Field(
        default_factory=list, max_length=MAX_MEMBERS, description="Ids of released workers whose pod still exists."
    )
    surplus_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Ids in `leavingIds` of workers that a smaller layout no longer needs. They count as released once"
        " their pods are gone.",
    )
    claimed_ids: list[Count] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Ids of workers beyond the job's starting size. Their pods have a lower priority, and they are"
        " released first.",
    )
    layout_generation: Count = Field(
        default=0, description="Number of the newest published generation. It never falls."
    )
    next_worker_id: Count = Field(default=0, description="Id that the next worker gets. Ids are never reused.")
    first_new_worker_id: Count = Field(
        default=0,
        description="`nextWorkerId` when the newest generation was published. A worker with a lower id may have been a"
        " member. So it is not created again once its pod is gone.",
    )
    num_shards: Positive | None = Field(
        default=None,
        description="Maximum number of pipelines until the job starts again. It is what the spec allowed at the start,"
        " and at most the number of shards of the checkpoint that the job resumed.",
    )
    initial_workers: Count = Field(
        default=0,
        description="Number of workers at a start that `maxWorkers` does not limit. Savings are measured against it.",
    )
    workers: Count = Field(
        default=0, description="Number of pods that still exist. The scale subresource shows it as replicas."
    )
    selector: str = Field(
        default="", max_length=1024, description="Label selector of the job's pods, for the scale subresource."
    )
    share: Share | None = None
    quota_requests: list[QuotaRequest] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Requests to the job's queue. The operator writes a request before it asks the queue. Empty without"
        " a queue.",
    )
    next_request_id: Count = Field(default=0, description="Id that the next request gets. Ids are never reused.")
    priority: int = Field(
        default=0,
        ge=-(2**31),
        lt=2**31,
        description="Priority that the job's pods had when they last existed. A job whose start was postponed has no"
        " pods, so it keeps its place among other jobs by this number.",
    )
    gpus: Gpus = Field(default_factory=Gpus)
    gpu_seconds_saved: Seconds = Field(
        default=0.0,
        description="GPU-seconds that packing saved up to `gpuSecondsTime`. From then on `gpus.saved` GPU-seconds are"
        " added each second.",
    )
    gpu_seconds_time: datetime | None = Field(default=None, description="Time up to which `gpuSecondsSaved` counts.")
    frozen: str = Field(default="", max_length=32, description="Numbers of frozen and of all layers, such as 6/12.")
    start_time: datetime | None = Field(
        default=None, description="When the job began to ask for workers, after it was created or last resumed."
    )
    stop: Stop | None = None
    unsettled_step: Count | None = Field(
        default=None,
        description="Newest committed step when all workers were taken away, but not by the operator. They may have"
        " written a last checkpoint, so only the next start shows how many steps are lost.",
    )
    completion_time: datetime | None = Field(default=None, description="When the job completed or failed.")
    failures: Count = Field(
        default=0, description="Number of failures since the job was created, including those that no longer count."
    )
    failure_steps: list[Count] = Field(
        default_factory=list,
        max_length=10001,
        description="For each failure that counts against `runPolicy.backoffLimit`: the committed step at which it"
        " happened. A failure is removed after `forgetFailuresAfterSteps` more steps.",
    )
    node_losses: Count = Field(
        default=0,
        description="Number of nodes that were lost while members of the job ran on them. This is not a failure of the"
        " job.",
    )
    silences: list[NodeSilence] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Nodes whose members recently stopped sending heartbeats.",
    )
    resize_failures: Count = Field(
        default=0,
        description="How many resizes in a row were cancelled during preparation. Each one doubles the wait before the"
        " next.",
    )
    slow_starts: Count = Field(
        default=0,
        description="How many starts in a row were postponed although all workers had a node. Each one doubles the time"
        " that the next start may take.",
    )
    next_resize_time: datetime | None = Field(default=None, description="No resize is prepared before this time.")
    waits_for_nodes_since: datetime | None = Field(
        default=None,
        description="Since when a job that does not train waits, because it found no nodes. If accelerators are"
        " released or a node appears, it tries again before `nextResizeTime`.",
    )
    not_committed: LayoutSize | None = Field(
        default=None,
        description="The layout that the members could not commit. It is not tried again before `nextResizeTime`.",
    )
    too_short: TooShort | None = None
    unused_shares: Count = Field(
        default=0,
        description="How many times in a row other jobs released workers for this job, and it still found no node.",
    )
    sits_out_until: datetime | None = Field(
        default=None,
        description="No other job releases workers for this job before this time, because it found no node when others"
        " did, or because it released workers itself.",
    )
    drain_deadline: datetime | None = Field(
        default=None,
        description="Until this time the PodDisruptionBudget holds back evictions of workers on cordoned nodes, so that"
        " the operator can replace these workers.",
    )
    drains: list[Drain] = Field(
        default_factory=list,
        max_length=MAX_MEMBERS,
        description="Workers on cordoned nodes, in the order in which the operator saw that the nodes were cordoned.",
    )
    observed_generation: Count = Field(
        default=0, description="`metadata.generation` of the spec that the status is based on."
    )

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of type `kind`; None if it was never set."""
        for condition in self.conditions:  # a loop, because a turn asks hundreds of times
            if condition.type is kind:
                return condition
        return None

    def reason(self, kind: ConditionType) -> str:
        """The reason of the condition of type `kind`; empty if it was never set."""
        condition = self.condition(kind)
        return condition.reason if condition is not None else ""

    def is_true(self, kind: ConditionType) -> bool:
        """Whether the status of the condition of type `kind` is True."""
        condition = self.condition(kind)
        return condition is not None and condition.status is ConditionStatus.TRUE

    def says_the_same_as(self, other: "JobStatus") -> bool:
        """Whether both statuses are the same except for what changes with each pod while a job starts.

        The reasons and messages of conditions change so. Before training begins, the number of pods and the end of a
        start's trouble do so too. Until that end is written, the start only has less time if trouble comes back."""
        if self.generation is None and self.resize and other.resize and self.resize.trouble_time is None:
            begun = {"trouble_time": None, "deadline": self.resize.deadline}
            other = other.model_copy(update={"resize": other.resize.model_copy(update=begun)})
        return self._without_words() == other._without_words()

    def _without_words(self) -> "JobStatus":
        conditions = [one.model_copy(update={"reason": "", "message": ""}) for one in self.conditions]
        status = self.model_copy(update={"conditions": conditions})
        if self.generation is None:
            status = status.model_copy(update={"workers": 0, "gpus": self.gpus.model_copy(update={"held": 0})})
        return status

    @property
    def awaited_checkpoint(self) -> str:
        """Token of the checkpoint that a user asked for and that is not durable yet; empty without one."""
        request = self.checkpoint_request
        return request.token if request is not None and request.is_open else ""

    @property
    def own_requests(self) -> list[QuotaRequest]:
        """The quota requests for workers of the starting size and for their replacements. All others are claims."""
        return [*self.quota_requests[:1], *(request for request in self.quota_requests[1:] if request.own)]

    def gpu_seconds_saved_at(self, now: datetime) -> float:
        """GPU-seconds that packing has saved until `now`. The operator does not write them only because time passes."""
        if self.gpu_seconds_time is None:
            return self.gpu_seconds_saved
        return self.gpu_seconds_saved + self.gpus.saved * max(0.0, (now - self.gpu_seconds_time).total_seconds())

    @property
    def finished(self) -> bool:
        """Whether the job completed or failed."""
        return self.is_true(ConditionType.COMPLETE) or self.is_true(ConditionType.FAILED)
