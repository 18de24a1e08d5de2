"""Pods of other owners, by one watch: what those with a node hold there, and which find none."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_operator.kube.capacity.free_accelerators import FreeAccelerators
from pipetransformer_operator.kube.capacity.node_fit import PodShape, requests_of, shape_of
from pipetransformer_operator.kube.client.api import Api, Object
from pipetransformer_operator.plan import Waiting

from .follow import follow

PATH = "/api/v1/pods"
#: A pod that has ended holds nothing, and the watch shows it as deleted.
QUERY = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed", "labelSelector": f"!{JOB_LABEL}"}
#: A scheduler tries again when a pod ends, and an autoscaler may have begun to help.
PATIENCE_SECONDS = 5.0


class OtherPods:
    """See the module.

    Args:
        api: of the cluster.
        free: is told of each pod.
        clock: seconds that only grow.
        released: called when a pod gave accelerators of its node back.

    Attributes:
        listed: whether all pods were listed: before, nodes seem emptier than they are.
    """

    def __init__(
        self,
        api: Api,
        free: FreeAccelerators,
        clock: Callable[[], float] = time.monotonic,
        released: Callable[[], None] = lambda: None,
    ) -> None:
        self.listed = False
        self._api = api
        self._free = free
        self._clock = clock
        self._released = released
        self._known: set[str] = set()
        self._seen: dict[str, tuple[float, Waiting, PodShape]] = {}

    def waiting(self) -> list[Waiting]:
        """Those that have waited for a while."""
        late = (seen for seen in self._seen.values() if self._clock() >= seen[0] + PATIENCE_SECONDS)
        return [replace(pod, places=self._places(pod, shape)) for _, pod, shape in late]

    def _places(self, pod: Waiting, shape: PodShape) -> Mapping[str, int] | None:
        """Nodes that would take the pod; None where it lacks several resources, of which no worker frees more than
        one."""
        return self._free.lacking(shape, *pod.lacks) if len(pod.lacks) == 1 else None

    def note(self, pod: Object, *, deleted: bool = False) -> None:
        """Takes what the watch showed."""
        uid, wants = pod["metadata"]["uid"], None if deleted else waiting_of(pod)
        if deleted:
            self._drop(uid)
        else:
            self._known.add(uid)
            if self._free.note_pod(pod):
                self._released()
        if wants is None:
            self._seen.pop(uid, None)
        else:
            since = self._seen[uid][0] if uid in self._seen else self._clock()
            self._seen[uid] = since, wants, shape_of(pod["spec"])

    async def run(self) -> None:
        """Watches until it is cancelled."""
        async for pod, deleted in follow(self._api, PATH, QUERY, relist=self._list):
            self.note(pod, deleted=deleted)

    async def _list(self) -> str:
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
        return version

    def _drop(self, uid: str) -> None:
        self._known.discard(uid)
        self._seen.pop(uid, None)
        if self._free.drop_pod(uid):
            self._released()


def waiting_of(pod: Object) -> Waiting | None:
    """What the pod waits for, by the scheduler's own words; None if it waits for no resource."""
    status = pod.get("status", {})
    said: Object = next((one for one in status.get("conditions", []) if one["type"] == "PodScheduled"), {})
    if said.get("reason") != "Unschedulable" or "deletionTimestamp" in pod["metadata"]:
        return None
    if status.get("nominatedNodeName"):  # others are preempted for it already
        return None
    lacking = {name.rstrip(".,") for name in re.findall(r"Insufficient (\S+)", said.get("message", ""))}
    wants = {name: amount // 1000 for name, amount in requests_of(pod["spec"]).items() if "/" in name}
    lacks = {name: amount for name, amount in wants.items() if name in lacking and amount}  # cpu has no domain
    if not lacks:
        return None
    return Waiting(pod["metadata"]["uid"], int(pod["spec"].get("priority") or 0), lacks)
