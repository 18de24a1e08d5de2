"""How many more workers of a job nodes would take now, less those that other jobs are about to put there.

Several jobs may see the same free accelerator in the same moment. Whoever plans first reserves it, until its pod has a
node or is not wanted any longer; the others count it as taken, so each accelerator draws one pod.
"""

from collections.abc import Callable

from pipetransformer_operator.controller.ports import JobKey, Room
from pipetransformer_operator.kube.client.api import Object

from .free_accelerators import FreeAccelerators
from .node_fit import PodShape

#: Where nodes are not seen, nobody knows what is free.
NO_ROOM_KNOWN = Room(None, 0)


class Reservations:
    """See the module.

    Args:
        free: what nodes have left.
        known: whether all nodes' pods were listed: before, there seems to be more room than there is.
        released: called when a job needs less than it had reserved.
    """

    def __init__(
        self, free: FreeAccelerators, known: Callable[[], bool], released: Callable[[], None] = lambda: None
    ) -> None:
        self._free = free
        self._known = known
        self._released = released
        self._reserved: dict[JobKey, tuple[PodShape, int]] = {}

    def room(self, key: JobKey, shape: PodShape) -> Room:
        """How many more of the job's workers, which have pods of that shape, would find a node now. Its own that have
        none yet are among them."""
        if not self._known():
            return NO_ROOM_KNOWN
        mine = self._free.room_by_node(shape)
        free = unreserved = sum(mine.values())
        for other, (taken, workers) in self._reserved.items():
            if unreserved <= 0:
                break
            if other != key and not mine.keys().isdisjoint(self._free.room_by_node(taken)):
                unreserved -= workers
        return Room(free, max(0, unreserved))

    def reach(self, shape: PodShape, priority: int) -> int | None:
        """How many more pods of that shape and priority nodes would take if pods of lower priority went."""
        return self._free.reach(shape, priority) if self._known() else None

    def holders(self, node: str) -> int:
        """Pods that hold accelerators of that node."""
        return self._free.holders(node)

    def reserve(self, key: JobKey, shape: PodShape, workers: int) -> None:
        """The job wants so many workers that have no node yet."""
        _, before = self._reserved.pop(key, (shape, 0))
        if workers:
            self._reserved[key] = shape, workers
        if before > workers:
            self._released()

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        if self._reserved.pop(key, None) is not None:
            self._released()


def awaits_room(pod: Object) -> bool:
    """Whether the pod has no node, and may get one as soon as there is room. One that its volumes keep off all nodes
    takes nothing from others."""
    if pod["spec"].get("nodeName"):
        return False
    conditions = pod.get("status", {}).get("conditions", [])
    said: Object = next((one for one in conditions if one["type"] == "PodScheduled"), {})
    return said.get("status") != "False" or "Insufficient" in (said.get("message") or "")
