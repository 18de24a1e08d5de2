"""How many more workers of a job nodes would take now, without room that other jobs have reserved.

Several jobs may see the same free accelerator at the same moment. The job that plans first reserves it until its pod
has a node or is no longer wanted. Other jobs count it as taken, so each accelerator attracts only one pod.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import JobKey, Room
from pipetransformer_operator.kube.events import NO_LISTENER, ClusterListener

from .free_accelerators import FreeAccelerators
from .node_fit import PodShape


def unknown_room(why: str) -> Room:
    """An unknown room, and why it is unknown."""
    return Room(None, 0, unknown=why)


class Lister(Protocol):
    """Tells whether a watch of pods has listed all its pods."""

    @property
    def listed(self) -> bool:
        """Whether it has listed all its pods."""
        ...


class Reservations:
    """Reserves free accelerators for workers that jobs want, and says how many more workers a job may count on.

    Args:
        free: knows what nodes have left.
        listers: watches of all pods. Until all have listed theirs, nodes seem to have more room than they do.
        events: is told when a job needs less than it reserved.
    """

    def __init__(
        self, free: FreeAccelerators, listers: Sequence[Lister], events: ClusterListener = NO_LISTENER
    ) -> None:
        self._free = free
        self._listers = listers
        self._events = events
        self._reserved: dict[JobKey, tuple[PodShape, int]] = {}
        self._by_shape: Counter[PodShape] = Counter()

    def room(self, key: JobKey, shape: PodShape, avoided: Collection[str] = ()) -> Room:
        """How many of the job's workers without a node, and new ones, would find a node now.

        Args:
            key: namespace and name of the job.
            shape: shape of its pods.
            avoided: nodes that its pods do not use.
        """
        if not self._known:
            return unknown_room("the operator has not yet listed all pods")
        mine = {name: room for name, room in self._free.room_by_node(shape).items() if name not in avoided}
        free = unreserved = sum(mine.values())
        own_shape, own = self._reserved.get(key, (shape, 0))
        for taken, reserved in self._by_shape.items():  # not job by job, because thousands may start at once
            workers = reserved - own if taken == own_shape else reserved
            if workers and not mine.keys().isdisjoint(self._free.room_by_node(taken)):
                unreserved -= workers
        return Room(free, max(0, unreserved))

    def reach(self, shape: PodShape, priority: int, avoided: Collection[str] = ()) -> int | None:
        """Like `room`, if pods of lower priority were preempted. None while it is unknown."""
        if not self._known:
            return None
        found = self._free.reach_by_node(shape, priority)
        return sum(room for name, room in found.items() if name not in avoided)

    def room_by_label(
        self, shape: PodShape, label: str, avoided: Collection[str], apart_from: Collection[str]
    ) -> Mapping[str, int]:
        """See `FreeAccelerators`; with reserved room. Empty while it is unknown."""
        return self._free.room_by_label(shape, label, avoided, apart_from) if self._known else {}

    def lists(self, resource: str) -> bool:
        """Whether a node lists the resource. None does if its name is wrong, or if only DRA drivers serve it."""
        return self._free.lists(resource)

    def holders(self, node: str) -> int:
        """How many pods hold accelerators of the node."""
        return self._free.holders(node)

    def reserve(self, key: JobKey, shape: PodShape, workers: int) -> None:
        """The job wants this many workers that have no node yet."""
        before = self._release(key)
        if workers:
            self._reserved[key] = shape, workers
            self._by_shape[shape] += workers
        if before > workers:
            self._events.on_reservation_returned(key)

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        if self._release(key):
            self._events.on_reservation_returned(key)

    def _release(self, key: JobKey) -> int:
        """Forgets what the job reserved, and returns for how many workers that was."""
        if key not in self._reserved:
            return 0
        shape, workers = self._reserved.pop(key)
        self._by_shape[shape] -= workers
        if not self._by_shape[shape]:
            del self._by_shape[shape]
        return workers

    @property
    def _known(self) -> bool:
        return all(lister.listed for lister in self._listers)


def awaits_room(pod: Object) -> bool:
    """Whether the pod has no node, and lacks only room for one: its volumes, for example, do not hold it up."""
    if pod["spec"].get("nodeName"):
        return False
    conditions = pod.get("status", {}).get("conditions", [])
    said: Object = next((one for one in conditions if one["type"] == "PodScheduled"), {})
    return said.get("status") != "False" or "Insufficient" in (said.get("message") or "")
