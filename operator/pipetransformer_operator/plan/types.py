"""What `plan()` sees and what it answers.

All types are frozen: a plan is made from one look at the cluster, and executed or thrown away as a whole.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType

from pipetransformer_contract.api.status import JobStatus, Reason, Share
from pipetransformer_contract.messages import Ready, Report

#: Between two heartbeats of a worker, unless the operator asks for fewer.
SHORTEST_PACE = timedelta(seconds=2)


#: If more than this many accelerators failed on a node, no worker is sent there for `AVOIDED`.
FAILURES_ALLOWED = 1
AVOIDED = timedelta(hours=1)
#: How `Worker.waiting` begins while its node has not set up what containers need. Images are pulled after that.
NOT_SET_UP = "PodNotSetUp"


class WorkerPhase(StrEnum):
    """As a pod's phase."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's pod (or local process) that is not gone yet.

    `exit_code` and `message` are of the trainer container alone: None and empty while it runs. `phase` is Succeeded or
    Failed as soon as the trainer container has ended, whatever sidecars do. A pod that was evicted or lost before its
    trainer exited is Failed without an exit code. `waiting` is why it does not run yet, such as `ErrImagePull: ...`.
    `lingers` says that the trainer has ended and another container of the pod has not.
    `disrupted` says that the cluster takes it away (preemption, eviction, a drained node), or that its node
    did not take it at all (then `rejected`, too), which is no failure.
    `draining` says that its node takes no pods any more, or is not well; `drain_reason` by which mark.
    `node_lost` says that its node is not heard, or gone, as far as nodes are seen; `node_gone` that it was deleted.
    `end_time` is when a pod that is being deleted should be gone, its grace period included, by the cluster's clock.
    `node_doubted` says that other workers there fell silent lately.
    `shares_node` says that pods of other jobs or owners hold accelerators of its node.
    `unattended_since` is when the operator first saw that it has a node which has said nothing of it; None once it has.
    `priority` is the number that the cluster made of its PriorityClass.
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
    def holds(self) -> bool:
        """Whether its pod still has an accelerator: until all of its containers have ended."""
        return self.lingers or self.phase in (WorkerPhase.PENDING, WorkerPhase.RUNNING)


@dataclass(frozen=True, slots=True)
class Beat:
    """What a worker's newest heartbeat said.

    Attributes:
        time: when it came.
        layout_generation: the newest generation that the worker has committed, or left with; 0 for none.
        waiting_after: the worker is in no group and waits for a generation above this one; None while it is in one.
        waiting_since: when it first said so.
        pace: after how long the operator asked for the next.
        because: why its group broke, or a generation did not come about, as it saw it; until it is in one again.
        unsaved: why the checkpoint that it was told to leave cannot be written yet.
    """

    time: datetime
    layout_generation: int
    waiting_after: int | None = None
    waiting_since: datetime | None = None
    pace: timedelta = SHORTEST_PACE
    because: str = ""
    unsaved: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the queue says to one request now.

    Attributes:
        admitted: the quota is the job's, and the queue does not want it back.
        message: why it is not admitted, or why it is wanted back.
        withdrawn: the request was deleted, and has to be made again.
    """

    admitted: bool
    message: str = ""
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """What is known of the queue that a job names.

    Attributes:
        problem: why nothing is known of it; then `answers` mean nothing, and quota that was granted is kept.
        answers: by the request's name; a request that is not there is not made yet, or was deleted.
    """

    problem: str = ""
    answers: Mapping[str, Answer] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is known of nodes, as far as they are seen.

    Attributes:
        lost: names of those that are not heard, or gone.
        failures: by name, how many accelerators failed there lately, of any job's workers.
        avoided: by name, until when no worker is sent there because accelerators failed.
    """

    lost: Set[str] = frozenset()
    failures: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    avoided: Mapping[str, datetime] = field(default_factory=lambda: MappingProxyType({}))


#: Where no node is seen.
UNSEEN = NodeFacts()


@dataclass(frozen=True, slots=True)
class Observed:
    """One look at a job.

    Attributes:
        status: as last written or read; the only memory.
        workers: all pods whose controller is this job, those that are terminating or have ended included. It must be
            complete: a member that is missing here is taken for lost. Pods just created belong here at once.
        ready: by worker uid, what workers said that are warm; lost when the operator restarts and soon said again.
        report: newest report that the channel got; None until one came after the operator's start.
        heard: by worker uid, when the worker last said anything.
        beats: by worker uid, its newest heartbeat.
        pace: between two heartbeats of a worker, as workers are asked for now.
        report_pace: between two reports of mere progress, as leaders are asked for now.
        lost_peers: names of members whose connection broke, as other members of the published generation said.
        conflicts: names of workers of this job that pods of another owner have.
        kept_by: foreign finalizers that keep a job which is being deleted; None: it is not being deleted.
        refusal: why the cluster refused to create a worker in the last turn; empty when it did not.
        undeleted: by worker uid, why the cluster refused to delete the worker when it was last asked.
        share: workers that the job may have while other jobs want some, by `allocate`; None: as many as it gets.
        queue: of a job that has to ask one for its workers; None: it may have what the cluster gives it.
        released: when another owner last released accelerators, or a node appeared; None: not seen.
        gives_way_to: another waiting job that can start if this one, which cannot, holds nothing; empty without one.
        preferred_since: since when other waiting jobs give way to this one; None: they do not.
        nonce: random text, fresh in every look, for the generation that this turn may publish.
        nodes: what is known of nodes.
        sees_drains: whether workers are seen as `draining` before their node is emptied.
        free: more workers of the job that nodes would take now; None: unknown.
        room: those of `free` that no other job is about to take; 0 if unknown, None if there is no bound.
        reach: as `free`, with pods that workers of the starting size would preempt; None: unknown.
        since: when this operator began to hear the job, at its start or after all were silent; earlier silence proves
            nothing.
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
    nonce: str = ""
    since: datetime | None = None
    nodes: NodeFacts = UNSEEN
    sees_drains: bool = True
    free: int | None = None
    room: int | None = None
    reach: int | None = None


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
        worker_id: of the worker.
        name: of the worker.
        uid: the precondition: another pod of that name stays.
        why: in words; an event says it when the worker is deleted.
    """

    worker_id: int
    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in this order: write `status` (with the resourceVersion read) if it differs, create, delete, tell.

    A crash between two steps loses only events: the next plan, made from the status, repeats the rest.

    Attributes:
        create: ids of workers that ought to exist and do not; the worker's name is `worker_name(job, id)`.
        delete: workers to delete, and why.
        requeue_after: seconds until time alone changes the answer; None when only an event can.
        min_available: workers that evictions must leave; None before the first layout, and once no worker of a job
            that has ended holds anything.
        keeps_unready: whether that includes pods that run and are not ready, for example because a sidecar ended.
        doubted: nodes whose members fell silent, and until when the cluster may not know yet that they are lost.
        unfit: nodes that rejected workers, or whose accelerator failed, and until when the job avoids them.
        broken: by uid, nodes of workers whose accelerator failed.
        waits_for_room: another turn is worth it once accelerators become free.
        expired: the job has outlived `ttlSecondsAfterFinished` and is to be deleted itself.
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
    waits_for_room: bool = False


def worker_name(job: str, worker_id: int) -> str:
    """Name of a worker and of its pod; never reused within a job."""
    return f"{job}-w{worker_id}"
