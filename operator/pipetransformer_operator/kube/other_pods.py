"""Pods of other owners, by one watch: what those with a node hold there, and which find none."""

import re
import time
from collections.abc import Callable

from ..plan import Waiting
from ..plan.accounting import JOB_LABEL
from .api import Api, Object
from .follow import follow
from .free_accelerators import FreeAccelerators
from .quantity import whole

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

    Attributes:
        listed: whether all pods were listed: before, nodes seem emptier than they are.
    """

    def __init__(self, api: Api, free: FreeAccelerators, clock: Callable[[], float] = time.monotonic) -> None:
        self.listed = False
        self._api = api
        self._free = free
        self._clock = clock
        self._known: set[str] = set()
        self._seen: dict[str, tuple[float, Waiting]] = {}

    def waiting(self) -> list[Waiting]:
        """Those that have waited for a while."""
        return [pod for since, pod in self._seen.values() if self._clock() >= since + PATIENCE_SECONDS]

    def note(self, pod: Object, *, deleted: bool = False) -> None:
        """Takes what the watch showed."""
        uid, wants = pod["metadata"]["uid"], None if deleted else waiting_of(pod)
        if deleted:
            self._drop(uid)
        else:
            self._known.add(uid)
            self._free.note_pod(pod)
        if wants is None:
            self._seen.pop(uid, None)
        else:
            self._seen[uid] = (self._seen[uid][0] if uid in self._seen else self._clock(), wants)

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
        self._free.drop_pod(uid)


def waiting_of(pod: Object) -> Waiting | None:
    """What the pod waits for, by the scheduler's own words; None if it waits for no resource."""
    status = pod.get("status", {})
    said: Object = next((one for one in status.get("conditions", []) if one["type"] == "PodScheduled"), {})
    if said.get("reason") != "Unschedulable" or "deletionTimestamp" in pod["metadata"]:
        return None
    if status.get("nominatedNodeName"):  # others are preempted for it already
        return None
    lacking = {name.rstrip(".,") for name in re.findall(r"Insufficient (\S+)", said.get("message", ""))}
    lacks: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for name, amount in container.get("resources", {}).get("requests", {}).items():
            if "/" in name and name in lacking and (wanted := whole(amount)):  # cpu and memory have no domain
                lacks[name] = lacks.get(name, 0) + wanted
    if not lacks:
        return None
    return Waiting(pod["metadata"]["uid"], int(pod["spec"].get("priority") or 0), lacks)
