"""How many accelerators are free on each node: what the node has, minus what pods there hold.

Watches of nodes and of all pods keep this up to date, so asking costs no request. Each answer is as old as the watches,
some hundred milliseconds, and does not know what the scheduler is about to do.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object

from .node_fit import Amounts, NodeView, PodShape, allows, fits, is_extended, node_view, requests_of

#: Largest number of pod shapes whose room is kept up to date. The jobs of one cluster have few.
SHAPES = 64
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class PodView:
    """What a pod holds, and where.

    Attributes:
        uid: UID of the pod.
        node: name of the node that it is bound to, or on which the scheduler preempts others for it; empty for none.
        requests: what it holds there, in thousandths of each resource's unit.
        priority: the number of its PriorityClass.
    """

    uid: str
    node: str
    requests: Amounts
    priority: int = 0


def pod_view(pod: Object) -> PodView | None:
    """The view of a pod from the API server. None if the pod has ended or has no node yet.

    A nominated node counts only for other owners' pods, because a worker without a node has a reservation."""
    status, spec, labels = pod.get("status", {}), pod["spec"], pod["metadata"].get("labels", {})
    node = spec.get("nodeName") or (status.get("nominatedNodeName") if JOB_LABEL not in labels else "")
    if not node or status.get("phase") in _ENDED:
        return None
    return PodView(pod["metadata"]["uid"], node, requests_of(spec), int(spec.get("priority") or 0))


class NodeGate(Protocol):
    """Knows which nodes take no pods."""

    def is_closed(self, name: str) -> bool:
        """Whether the node takes no pods now, because its workers leave it or it is lost."""
        ...


class FreeAccelerators:
    """Counts what pods hold on each node, and how many more pods of a shape each node would take.

    Args:
        gate: knows which nodes take no pods; None: all take pods.
    """

    def __init__(self, gate: NodeGate | None = None) -> None:
        self._gate = gate
        self._nodes: dict[str, NodeView] = {}
        self._pods: dict[str, PodView] = {}
        self._held: dict[str, dict[str, int]] = {}
        self._rooms: dict[PodShape, dict[str, int]] = {}
        self._reaches: dict[tuple[PodShape, int], dict[str, int]] = {}
        self._holders: Counter[str] = Counter()

    def note_node(self, node: Mapping[str, Any], *, deleted: bool = False) -> None:
        """Takes what the watch of nodes showed."""
        view = node_view(node)
        if deleted:
            self._nodes.pop(view.name, None)
        else:
            self._nodes[view.name] = view
        self._count(view.name)

    def note_pod(self, pod: Object) -> bool:
        """Takes what a watch of pods showed. Returns whether the pod released accelerators of its node."""
        view, uid = pod_view(pod), pod["metadata"]["uid"]
        before = self._pods.get(uid)
        if view == before:
            return False
        if view is not None:
            self._pods[uid] = view
            self._hold(view, 1)
        if before is not None:
            self._hold(before, -1)
            if view is None:
                del self._pods[uid]
            if view is None or view.node != before.node:
                return _holds_extended(before)
        return False

    def drop_pod(self, uid: str) -> bool:
        """The pod is gone. Returns whether it released accelerators of its node."""
        view = self._pods.pop(uid, None)
        if view is None:
            return False
        self._hold(view, -1)
        return _holds_extended(view)

    def room_by_node(self, shape: PodShape) -> Mapping[str, int]:
        """How many more pods of this shape each node would take now, without nodes that take none."""
        if shape not in self._rooms:
            if len(self._rooms) >= SHAPES:
                del self._rooms[next(iter(self._rooms))]
            self._rooms[shape] = {name: room for name in self._nodes if (room := self._room(name, shape))}
        return self._rooms[shape]

    def room_by_label(
        self, shape: PodShape, label: str, avoided: Collection[str], apart_from: Collection[str]
    ) -> dict[str, int]:
        """How many more pods of this shape find nodes, by the nodes' value of a label.

        Args:
            shape: shape of the pods.
            label: key of the label.
            avoided: nodes that the pods do not use.
            apart_from: nodes whose values are left out.
        """
        values = {name: node.labels[label] for name, node in self._nodes.items() if label in node.labels}
        taken = {values[name] for name in apart_from if name in values}
        found: Counter[str] = Counter()
        for name, room in self.room_by_node(shape).items():
            if name in values and name not in avoided and values[name] not in taken:
                found[values[name]] += room
        return found

    def lists(self, resource: str) -> bool:
        """Whether a node lists the resource, also one that takes no pods now."""
        return any(resource in node.allocatable for node in self._nodes.values())

    def holders(self, node: str) -> int:
        """How many pods hold accelerators of the node."""
        return self._holders[node]

    def lacking(self, shape: PodShape, resource: str) -> dict[str, int]:
        """Units of the resource that each node lacks for one pod of this shape.

        Lists only nodes that would take the pod once enough of that resource is free."""
        wants, lacking = shape.requests.get(resource, 0), {}
        for name, node in self._nodes.items():
            if self._closed(name) or not allows(node, shape.spec) or not fits(node.allocatable, shape.requests):
                continue
            missing = wants - self._left(node).get(resource, 0)
            lacking[name] = max(0, -(-missing // 1000))
        return lacking

    def reach_by_node(self, shape: PodShape, priority: int) -> Mapping[str, int]:
        """How many more pods of this shape each node would take if the scheduler preempted all pods of lower priority.

        Remembered until a node or what it holds changes, because this looks at all pods, and many jobs wait alike."""
        if (shape, priority) not in self._reaches:
            self._reaches[shape, priority] = self._reach(shape, priority)
        return self._reaches[shape, priority]

    def _reach(self, shape: PodShape, priority: int) -> dict[str, int]:
        lower: dict[str, dict[str, int]] = {}
        for pod in self._pods.values():
            if pod.priority < priority:
                held = lower.setdefault(pod.node, {})
                for name, amount in pod.requests.items():
                    held[name] = held.get(name, 0) + amount
        found = {}
        for name, node in self._nodes.items():
            more = lower.get(name, {})
            left = {resource: amount + more.get(resource, 0) for resource, amount in self._left(node).items()}
            if not self._closed(name) and allows(node, shape.spec):
                found[name] = fits(left, shape.requests)
        return found

    def _closed(self, name: str) -> bool:
        return self._gate is not None and self._gate.is_closed(name)

    def _count(self, name: str) -> None:
        """Recounts the room of one node."""
        self._reaches.clear()
        for shape, rooms in self._rooms.items():
            if room := self._room(name, shape):
                rooms[name] = room
            else:
                rooms.pop(name, None)

    def _room(self, name: str, shape: PodShape) -> int:
        """How many more pods of this shape the node would take now."""
        node = self._nodes.get(name)
        if node is None or self._closed(name):
            return 0
        room = fits(self._left(node), shape.requests)
        return room if room and allows(node, shape.spec) else 0

    def _left(self, node: NodeView) -> Amounts:
        """What pods leave of the node. An amount is negative if they hold more than it has, as after a device broke."""
        held = self._held.get(node.name)
        if not held:
            return node.allocatable
        return {name: amount - held.get(name, 0) for name, amount in node.allocatable.items()}

    def _hold(self, pod: PodView, sign: int) -> None:
        if _holds_extended(pod):
            self._holders[pod.node] += sign
            if not self._holders[pod.node]:
                del self._holders[pod.node]
        held = self._held.setdefault(pod.node, {})
        for name, amount in pod.requests.items():
            held[name] = held.get(name, 0) + sign * amount
            if not held[name]:
                del held[name]
        if not held:
            del self._held[pod.node]
        self._count(pod.node)


def _holds_extended(pod: PodView) -> bool:
    return any(map(is_extended, pod.requests))
