"""Pods of other owners: what they hold on their nodes, and which of them find no node."""

import re
import time
from dataclasses import replace
from functools import cache

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.clocks import Stopwatch
from pipetransformer_operator.kube.capacity.free_accelerators import FreeAccelerators
from pipetransformer_operator.kube.capacity.node_fit import PodShape, requests_of, shape_of
from pipetransformer_operator.kube.client.api import Api
from pipetransformer_operator.kube.events import NO_LISTENER, ClusterListener
from pipetransformer_operator.plan import PendingPod

from .follow import Awaited, follow

PATH = "/api/v1/pods"
#: Tells this watch from that of workers' pods, which may have the same path.
NAME = f"{PATH} of other owners"
#: A pod that has ended holds nothing; the watch shows it as deleted.
QUERY = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed", "labelSelector": f"!{JOB_LABEL}"}
#: A pod counts as waiting after this many seconds. Before that it may still find a node, because the scheduler tries
#: again when another pod ends, and an autoscaler may already add a node.
PATIENCE_SECONDS = 5.0


class OtherPods(Awaited):
    """Watches pods that are not workers. It counts what they hold, and remembers which of them wait for a node.

    Args:
        api: client of the API server.
        free: is told of each pod, and counts what it holds.
        clock: seconds that only grow.
        events: is told when a pod releases accelerators, and how the watch does.

    Attributes:
        listed: whether all pods were listed. Before that nodes seem emptier than they are.
    """

    def __init__(
        self,
        api: Api,
        free: FreeAccelerators,
        clock: Stopwatch = time.monotonic,
        events: ClusterListener = NO_LISTENER,
    ) -> None:
        super().__init__(PATH, events, QUERY, NAME)
        self.listed = False
        self._api = api
        self._free = free
        self._clock = clock
        self._known: set[str] = set()
        self._seen: dict[str, tuple[float, PendingPod, PodShape]] = {}

    def waiting(self) -> list[PendingPod]:
        """Pods that have waited for longer than `PATIENCE_SECONDS`.

        A pod that lacks several resources has no `missing_by_node`, because a worker frees only one."""
        late = (seen for seen in self._seen.values() if self._clock() >= seen[0] + PATIENCE_SECONDS)
        lacking = cache(self._free.lacking)  # it looks at all nodes, and hundreds of pods may wait alike
        return [
            replace(pod, missing_by_node=lacking(shape, *pod.requests) if len(pod.requests) == 1 else None)
            for _, pod, shape in late
        ]

    def note(self, pod: Object, *, deleted: bool = False) -> None:
        """Takes what the watch showed."""
        uid, wants = pod["metadata"]["uid"], None if deleted else pending_pod_of(pod)
        if deleted:
            self._drop(uid)
        else:
            self._known.add(uid)
            if self._free.note_pod(pod):
                self._events.on_accelerators_released(None)
        if wants is None:
            self._seen.pop(uid, None)
        else:
            since = self._seen[uid][0] if uid in self._seen else self._clock()
            self._seen[uid] = since, wants, shape_of(pod["spec"])

    async def run(self) -> None:
        """Watches until it is cancelled."""
        async for pod, deleted in follow(self._api, self):
            self.note(pod, deleted=deleted)

    async def relist(self) -> str:
        """See `Followed`."""
        there: set[str] = set()
        version = ""
        async for part in self._api.list(PATH, QUERY):
            version = part["metadata"]["resourceVersion"]
            for pod in part["items"]:
                there.add(pod["metadata"]["uid"])
                self.note(pod)
        for uid in self._known - there:
            self._drop(uid)
        self.listed = True
        self.on_answered()
        return version

    def _drop(self, uid: str) -> None:
        self._known.discard(uid)
        self._seen.pop(uid, None)
        if self._free.drop_pod(uid):
            self._events.on_accelerators_released(None)


def pending_pod_of(pod: Object) -> PendingPod | None:
    """The pod with what it waits for, according to the scheduler's message; None if it waits for no resource."""
    status = pod.get("status", {})
    said: Object = next((one for one in status.get("conditions", []) if one["type"] == "PodScheduled"), {})
    if said.get("reason") != "Unschedulable" or "deletionTimestamp" in pod["metadata"]:
        return None
    if status.get("nominatedNodeName"):  # the scheduler already preempts other pods for it
        return None
    lacking = {name.rstrip(".,") for name in re.findall(r"Insufficient (\S+)", said.get("message", ""))}
    wants = {name: amount // 1000 for name, amount in requests_of(pod["spec"]).items() if "/" in name}
    lacks = {name: amount for name, amount in wants.items() if name in lacking and amount}  # only names with a domain
    if not lacks:
        return None
    return PendingPod(pod["metadata"]["uid"], int(pod["spec"].get("priority") or 0), lacks)
