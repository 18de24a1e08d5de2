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

#: Shortest time between two heartbeats of a worker. An operator with many workers asks for longer ones.
SHORTEST_PACE = timedelta(seconds=2)


#: If more accelerators than this failed on one node, the operator creates no workers there for the time `AVOIDED`.
FAILURES_ALLOWED = 1
AVOIDED = timedelta(hours=1)
#: `Worker.why_pending` begins with this while the node sets up the pod's volumes and network, before it pulls images.
NOT_SET_UP = "PodNotSetUp"
#: `Worker.why_pending` begins with one of these if a container cannot start, because of its image or another reason.
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
        end_time: when a pod that is being deleted should be gone, by the clock of the API server. It is the time of the
            request plus the grace period. None if the pod is not being deleted.
        exit_code: of the trainer container; None while it runs.
        message: termination message of the trainer container; empty while it runs.
        lingers: the trainer has ended, but another container of the pod still runs.
        why_pending: why the pod does not run yet, such as `ErrImagePull: ...`.
        disrupted: the cluster takes the pod away (preemption, eviction, a drained node), or the node rejected it. This
            is not a failure.
        rejected: the node's kubelet rejected the pod before any container ran, for example because of a broken device.
        draining: the node accepts no new pods, or is unhealthy.
        drain_reason: the cordon, taint or condition of the node that makes it `draining`.
        node_lost: the node's kubelet does not respond, or the node was deleted. False if the operator sees no nodes.
        node_gone: the node was deleted.
        node_doubted: workers on the node fell silent lately, so the node may be dead before the cluster says so.
        shares_node: pods of other jobs or owners hold accelerators of the node.
        unattended_since: when the operator first saw that the pod has a node, but no status from the node's kubelet.
            None without a node, and once the kubelet has reported.
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
    why_pending: str = ""
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
        """Whether the worker can train, now or later: its pod is pending or runs, and is not being removed."""
        return not self.terminating and not self.disrupted and self.phase in (WorkerPhase.PENDING, WorkerPhase.RUNNING)

    @property
    def lacks_image(self) -> bool:
        """Whether the node cannot pull an image of the worker's pod."""
        return self.why_pending.startswith(IMAGE_TROUBLE)

    @property
    def cannot_start(self) -> bool:
        """Whether the node cannot set up the worker's pod, pull its images or start its containers."""
        return self.why_pending.startswith((*IMAGE_TROUBLE, *CONTAINER_TROUBLE, NOT_SET_UP))

    @property
    def holds(self) -> bool:
        """Whether the worker's pod still has an accelerator, because at least one of its containers has not ended."""
        return self.lingers or self.phase in (WorkerPhase.PENDING, WorkerPhase.RUNNING)


@dataclass(frozen=True, slots=True)
class Beat:
    """The newest heartbeat of a worker.

    Attributes:
        time: when the operator received the heartbeat.
        layout_generation: the newest generation that the worker committed, as a member or as a leaver; 0 for none.
        waiting_after: number of a generation. The worker is in no process group and waits for a generation with a
            higher number. None while the worker is in a process group.
        waiting_since: when the operator first heard of that wait; None while `waiting_after` is None.
        pace: time until the worker's next heartbeat, as the operator asked in its answer.
        why_broken: why the worker's process group broke, or why a new one did not form, in the worker's words. Empty
            once the worker is in a group again.
        unsaved: why the worker cannot write its part of a checkpoint; empty if it can.
    """

    time: datetime
    layout_generation: int
    waiting_after: int | None = None
    waiting_since: datetime | None = None
    pace: timedelta = SHORTEST_PACE
    why_broken: str = ""
    unsaved: str = ""


#: `Beat.time` of a worker that never sent a heartbeat.
NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a job's queue to one quota request.

    Attributes:
        admitted: the job has the quota, and the queue does not reclaim it.
        message: why the request is not admitted, or why the queue reclaims the quota.
        withdrawn: the request's object was deleted in the cluster, so the job must make a new request.
    """

    admitted: bool
    message: str = ""
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """What the operator knows about a job's queue.

    Attributes:
        problem: why the operator cannot read the queue's answers; empty if it can. With a problem the operator ignores
            `answers`, and the job keeps the quota that it has.
        answers: the queue's answers, by the name of the request. A request without an answer is not made yet, or was
            deleted.
    """

    problem: str = ""
    answers: Mapping[str, Answer] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the operator knows about nodes. Everything is empty if it does not watch nodes.

    Attributes:
        lost: names of nodes that do not respond or are gone.
        failures: by node name, how many accelerators failed there within a day, used by workers of any job.
        avoided: by node name, until when no worker of any job is created there, because accelerators failed.
    """

    lost: Set[str] = frozenset()
    failures: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    avoided: Mapping[str, datetime] = field(default_factory=lambda: MappingProxyType({}))


#: The facts of an operator that does not watch nodes: none.
UNSEEN = NodeFacts()


@dataclass(frozen=True, slots=True)
class Observed:
    """All that the operator knows about one job at one moment: the input of `plan()`.

    Attributes:
        status: the job's status as last written or read. Decisions remember nothing else between two turns.
        workers: all pods whose controller is this job, including terminating and ended ones. The list must be complete,
            because a missing member counts as lost. It includes pods as soon as they are created.
        ready: by worker uid, the report of each worker that has warmed up. A restarted operator has none until workers
            repeat it.
        report: the leader's newest report; None until this operator has received one.
        heard: by worker uid, when the worker last sent anything.
        beats: by worker uid, its newest heartbeat.
        pace: time between two heartbeats of a worker, as the operator asks for it now.
        report_pace: time between two reports of a leader that tell only of more steps, as the operator asks for it now.
        lost_peers: names of members whose connection broke, as reported by other members of the published generation.
        conflicts: names that this job's workers need, but that pods of other owners already have.
        kept_by: finalizers of other owners on a job that is being deleted; None if the job is not being deleted.
        refusal: why the cluster refused to create a worker, or what it needs, in the last turn; empty if it did not.
        unprotected: why the cluster refused the workers' NetworkPolicy or PodDisruptionBudget in the last turn; empty
            if it did not.
        undeleted: by worker uid, why the cluster refused the operator's last request to delete the worker.
        share: how many workers the job may have while other jobs want some, from `allocate`; None without a limit.
        queue: what the operator knows about the queue that the job names; None if the job needs no quota.
        released: when another owner last released accelerators, or a node appeared; None if the operator saw neither.
        gives_way_to: name of another waiting job. It can start if this job, which cannot start, holds no accelerators.
            Empty without such a job.
        preferred_since: when other waiting jobs began to give way to this one; None if they do not.
        checkpoint_now: token by which a user asks for a checkpoint; empty without one.
        nonce: random text, new at each turn, for the generation that this turn may publish.
        nodes: what the operator knows about nodes.
        sees_drains: whether the operator sees workers as `draining` before evictions empty their node.
        free: how many more workers of the job would find a node now; None if unknown.
        room: how many of `free` other jobs have not reserved; 0 if unknown, None if unlimited.
        reach: like `free`, plus workers that would find a node by preempting pods of lower priority; None if unknown.
        room_unknown: why `free` is unknown, in words.
        listening_since: when this operator began to listen to the job's workers: at its own start, or when it heard
            from workers again after all were silent. If a worker was silent before that, this proves nothing.
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
    unprotected: str = ""
    undeleted: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    share: Share | None = None
    queue: Queue | None = None
    released: datetime | None = None
    gives_way_to: str = ""
    preferred_since: datetime | None = None
    checkpoint_now: str = ""
    nonce: str = ""
    listening_since: datetime = NEVER
    nodes: NodeFacts = UNSEEN
    sees_drains: bool = True
    free: int | None = None
    room: int | None = None
    reach: int | None = None
    room_unknown: str = ""

    def beat(self, uid: str) -> Beat:
        """The newest heartbeat of a worker. For a worker that sent none: no generation, and the present `pace`."""
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
        why: the reason, as words that follow a colon. The event about the deletion quotes them.
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
class DisruptionBudget:
    """Which of a job's workers may be evicted (the PodDisruptionBudget).

    Attributes:
        min_available: how many of the workers that it covers evictions must leave.
        claimed: whether it covers claimed workers, too.
        unready: whether it also protects running pods that are not ready, for example because a sidecar ended.
    """

    min_available: int
    claimed: bool
    unready: bool


#: Evictions may remove any worker.
NO_DISRUPTION_BUDGET = DisruptionBudget(min_available=0, claimed=False, unready=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the operator does, in this order.

    It writes `status` (with the resourceVersion that it read) if it differs. Then it creates workers, deletes workers
    and sends events. A crash between two steps loses only events, because the next plan repeats all other steps.

    Attributes:
        create: ids of workers to create. Each worker's name is `worker_name(job, id)`.
        delete: workers to delete, and why.
        requeue_after: seconds until the plan changes because time has passed; None if only an event can change it.
        disruption_budget: None leaves the budget as it is: before the first layout, and some time after a job's end
            once none of its workers holds an accelerator.
        doubted: nodes whose workers fell silent, and until when the cluster may not know whether the nodes are lost.
        unfit: nodes that rejected workers or whose accelerator failed, and until when the job avoids them.
        failed_devices: the nodes of workers whose accelerator failed, by uid of the worker.
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
    disruption_budget: DisruptionBudget | None = None
    doubted: Mapping[str, datetime] = field(default_factory=lambda: MappingProxyType({}))
    unfit: Mapping[str, datetime] = field(default_factory=lambda: MappingProxyType({}))
    failed_devices: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    failures: tuple[NodeFailure, ...] = ()
    waits_for_room: bool = False


def worker_name(job: str, worker_id: int) -> str:
    """Name of a worker and of its pod; never reused within a job."""
    return f"{job}-w{worker_id}"
