"""The input and the result of `plan()`.

All types are frozen, because a plan is made from one look at the cluster and is executed or discarded as a whole.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from types import MappingProxyType

from pipetransformer_contract.api.status import JobStatus, Reason, Share
from pipetransformer_contract.messages import Ready, Report

#: Time between two heartbeats of a worker, unless the operator asks for fewer.
SHORTEST_PACE = timedelta(seconds=2)


#: If more than this many accelerators failed on a node, the operator sends no workers there for `AVOIDED`.
FAILURES_ALLOWED = 1
AVOIDED = timedelta(hours=1)
#: `Worker.waiting` begins with this while the node sets up what containers need, before it pulls images.
NOT_SET_UP = "PodNotSetUp"
#: How it begins if a container cannot be started: because of the image, or of the rest of the template.
IMAGE_TROUBLE = ("ErrImage", "Image", "InvalidImageName", "RegistryUnavailable")
CONTAINER_TROUBLE = ("CreateContainer", "RunContainerError")


class WorkerPhase(StrEnum):
    """Phase of a worker's pod, as in Kubernetes."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's pod (or local process) that is not gone yet.

    Attributes:
        phase: Succeeded or Failed once the trainer container has ended, even if sidecars still run. A pod that was
            evicted or lost before its trainer exited is Failed without an exit code.
        end_time: when a pod that is being deleted should be gone, by the cluster's clock; includes its grace period.
        exit_code: of the trainer container; None while it runs.
        message: termination message of the trainer container; empty while it runs.
        lingers: the trainer has ended, but another container of the pod still runs.
        waiting: why the pod does not run yet, such as `ErrImagePull: ...`.
        disrupted: the cluster takes the pod away (preemption, eviction, a drained node), or the node rejected it. This
            is not a failure.
        rejected: the node rejected the pod.
        draining: the node accepts no new pods, or is unhealthy.
        drain_reason: the mark on the node that says so.
        node_lost: the node does not respond or is gone, as far as the operator sees nodes.
        node_gone: the node was deleted.
        node_doubted: other workers on the node fell silent lately.
        shares_node: pods of other jobs or owners hold accelerators of the node.
        unattended_since: when the operator first saw that the pod has a node that has not reported its status; None
            once it has.
        priority: number that the cluster derived from the PriorityClass.
    """

    id: int
    name: str
    uid: str
    phase: WorkerPhase = WorkerPhase.PENDING
    terminating: bool = False
    end_time: datetime | None = None
    node: str = ""
    address: str = ""
    exit_code: int | None = None
    message: str = ""
    scheduled: bool = False
    lingers: bool = False
    waiting: str = ""
    disrupted: bool = False
    rejected: bool = False
    draining: bool = False
    drain_reason: str = ""
    node_lost: bool = False
    node_gone: bool = False
    node_doubted: bool = False
    shares_node: bool = False
    unattended_since: datetime | None = None
    priority: int = 0

    @property
    def alive(self) -> bool:
        """Whether it can train, now or later."""
        return not self.terminating and not self.disrupted and self.phase in (WorkerPhase.PENDING, WorkerPhase.RUNNING)

    @property
    def lacks_image(self) -> bool:
        """Whether an image of its pod cannot be had."""
        return self.waiting.startswith(IMAGE_TROUBLE)

    @property
    def cannot_start(self) -> bool:
        """Whether its node cannot set up its pod or start its containers."""
        return self.waiting.startswith((*IMAGE_TROUBLE, *CONTAINER_TROUBLE, NOT_SET_UP))

    @property
    def holds(self) -> bool:
        """Whether its pod still has an accelerator, because at least one container has not ended."""
        return self.lingers or self.phase in (WorkerPhase.PENDING, WorkerPhase.RUNNING)


@dataclass(frozen=True, slots=True)
class Beat:
    """The newest heartbeat of a worker.

    Attributes:
        time: when it came.
        layout_generation: the newest generation that the worker has committed or left with; 0 for none.
        waiting_after: the worker is in no group and waits for a generation above this one; None while it is in a group.
        waiting_since: when it first said so.
        pace: time until the next heartbeat, as the operator asked.
        because: why its group broke or a generation did not form, as the worker saw it; until it is in a group again.
        unsaved: why it cannot write its part of a checkpoint yet.
    """

    time: datetime
    layout_generation: int
    waiting_after: int | None = None
    waiting_since: datetime | None = None
    pace: timedelta = SHORTEST_PACE
    because: str = ""
    unsaved: str = ""


#: `Beat.time` of a worker that never sent a heartbeat.
NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Answer:
    """The queue's present answer to one request.

    Attributes:
        admitted: the job has the quota, and the queue does not want it back.
        message: why the request is not admitted, or why the queue wants the quota back.
        withdrawn: the request was deleted and must be made again.
    """

    admitted: bool
    message: str = ""
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """What the operator knows about a job's queue.

    Attributes:
        problem: why the operator knows nothing about it. Then `answers` mean nothing, and the job keeps its quota.
        answers: answers by the request's name. A missing request is not made yet, or was deleted.
    """

    problem: str = ""
    answers: Mapping[str, Answer] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the operator knows about nodes, as far as it sees them.

    Attributes:
        lost: names of nodes that do not respond or are gone.
        failures: by name, number of accelerators that failed there lately, with workers of any job.
        avoided: by name, time until which no worker is sent there because accelerators failed.
    """

    lost: Set[str] = frozenset()
    failures: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    avoided: Mapping[str, datetime] = field(default_factory=lambda: MappingProxyType({}))


#: For an operator that sees no nodes.
UNSEEN = NodeFacts()


@dataclass(frozen=True, slots=True)
class Observed:
    """One look at a job.

    Attributes:
        status: status as last written or read; the only memory.
        workers: all pods whose controller is this job, including terminating and ended ones. The list must be complete,
            because a missing member counts as lost. It includes pods as soon as they are created.
        ready: by worker uid, what warm workers reported. A restarted operator has none until workers repeat it.
        report: newest report that the channel received; None until one came after the operator's start.
        heard: by worker uid, when the worker last sent anything.
        beats: by worker uid, its newest heartbeat.
        pace: time between two heartbeats that the operator asks workers for now.
        report_pace: time between two reports that only say progress, which the operator asks leaders for now.
        lost_peers: names of members whose connection broke, as other members of the published generation said.
        conflicts: names of this job's workers that pods of other owners have.
        kept_by: foreign finalizers that keep a job that is being deleted; None if it is not being deleted.
        refusal: why the cluster refused to create a worker in the last turn; empty if it did not.
        undeleted: by worker uid, why the cluster refused to delete the worker when last asked.
        share: workers that the job may have while other jobs want some, by `allocate`; None for as many as it gets.
        queue: queue that the job must ask for its workers; None if it may have what the cluster gives it.
        released: when another owner last released accelerators, or a node appeared; None if not seen.
        gives_way_to: another waiting job that can start if this job, which cannot, holds nothing; empty without one.
        preferred_since: since when other waiting jobs give way to this one; None if they do not.
        checkpoint_now: token by which a user asks for a checkpoint; empty without one.
        nonce: random text, new in every look, for the generation that this turn may publish.
        nodes: what the operator knows about nodes.
        sees_drains: whether the operator sees workers as `draining` before their node is emptied.
        free: number of further workers of the job that nodes would take now; None if unknown.
        room: the part of `free` that no other job is about to take; 0 if unknown, None if unlimited.
        reach: like `free`, plus pods that workers of the starting size would preempt; None if unknown.
        since: when this operator began to listen to the job: at its start, or after all were silent. Earlier silence
            proves nothing.
    """

    uid: str
    name: str
    namespace: str
    status: JobStatus
    workers: tuple[Worker, ...] = ()
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    metadata_generation: int = 1
    ready: Mapping[str, Ready] = field(default_factory=lambda: MappingProxyType({}))
    report: Report | None = None
    heard: Mapping[str, datetime] = field(default_factory=lambda: MappingProxyType({}))
    beats: Mapping[str, Beat] = field(default_factory=lambda: MappingProxyType({}))
    pace: timedelta = SHORTEST_PACE
    report_pace: timedelta = timedelta(0)
    lost_peers: frozenset[str] = frozenset()
    conflicts: tuple[str, ...] = ()
    kept_by: tuple[str, ...] | None = None
    refusal: str = ""
    undeleted: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    share: Share | None = None
    queue: Queue | None = None
    released: datetime | None = None
    gives_way_to: str = ""
    preferred_since: datetime | None = None
    checkpoint_now: str = ""
    nonce: str = ""
    since: datetime | None = None
    nodes: NodeFacts = UNSEEN
    sees_drains: bool = True
    free: int | None = None
    room: int | None = None
    reach: int | None = None

    def beat(self, uid: str) -> Beat:
        """The newest heartbeat of a worker. One that sent none is in no group, and has the pace that is asked for."""
        return self.beats.get(uid) or Beat(NEVER, layout_generation=0, pace=self.pace)


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class PlanEvent:
    """A Kubernetes event about the job."""

    type: EventType
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Deletion:
    """A worker to delete.

    Attributes:
        worker_id: id of the worker.
        name: name of the worker.
        uid: uid of the pod to delete. Another pod of the same name stays.
        why: reason in words. An event gives it when the worker is deleted.
    """

    worker_id: int
    name: str
    uid: str
    why: str


class FailureCause(StrEnum):
    """Why a worker failed, as far as its pod and its node show."""

    ACCELERATOR = "Accelerator"  #: the trainer blames the device
    KILLED = "Killed"  #: exit code 137, most often because the host's memory limit is reached
    EXITED = "Exited"  #: another exit code
    POD = "Pod"  #: the pod failed without an exit code
    SILENT = "Silent"  #: it was not heard for too long, and its node is well
    LOST = "Lost"  #: its node is lost, which is no failure of the job


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A worker failed on a node, or the node was lost. `node` is empty for a worker that had none."""

    node: str
    cause: FailureCause


@dataclass(frozen=True, slots=True)
class Plan:
    """What the operator does, in this order.

    It writes `status` (with the resourceVersion that it read) if it differs. Then it creates workers, deletes workers
    and sends events. A crash between two steps loses only events, because the next plan repeats all other steps.

    Attributes:
        create: ids of workers that should exist but do not; the worker's name is `worker_name(job, id)`.
        delete: workers to delete, and why.
        requeue_after: seconds until time alone changes the plan; None if only an event can.
        min_available: workers that evictions must leave; None before the first layout, and once no worker of an ended
            job holds anything.
        keeps_unready: whether that includes running pods that are not ready, for example because a sidecar ended.
        doubted: nodes whose members fell silent, and until when the cluster may not yet know that they are lost.
        unfit: nodes that rejected workers or whose accelerator failed, and until when the job avoids them.
        broken: by uid, nodes of workers whose accelerator failed.
        failures: workers that failed and nodes that were lost, for the metrics.
        waits_for_room: the operator should plan again once accelerators become free.
        expired: `ttlSecondsAfterFinished` has passed, so the operator must delete the job itself.
    """

    status: JobStatus
    create: tuple[int, ...] = ()
    delete: tuple[Deletion, ...] = ()
    events: tuple[PlanEvent, ...] = ()
    requeue_after: float | None = None
    expired: bool = False
    min_available: int | None = None
    keeps_unready: bool = False
    doubted: Mapping[str, datetime] = field(default_factory=lambda: MappingProxyType({}))
    unfit: Mapping[str, datetime] = field(default_factory=lambda: MappingProxyType({}))
    broken: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    failures: tuple[NodeFailure, ...] = ()
    waits_for_room: bool = False


def worker_name(job: str, worker_id: int) -> str:
    """Name of a worker and of its pod; never reused within a job."""
    return f"{job}-w{worker_id}"
