"""Pods of other owners that find no node, by a watch of those pods alone that have none."""

import re
import time
from collections.abc import Callable

from ..plan import Waiting
from ..plan.accounting import JOB_LABEL
from .api import Api, Object
from .follow import follow
from .quantity import whole

PATH = "/api/v1/pods"
QUERY = {"fieldSelector": "spec.nodeName=,status.phase=Pending", "labelSelector": f"!{JOB_LABEL}"}
#: A scheduler tries again when a pod ends, and an autoscaler may have begun to help.
PATIENCE_SECONDS = 5.0


class WaitingPods:
    """See the module.

    Args:
        api: of the cluster.
        clock: seconds that only grow.
    """

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._seen: dict[str, tuple[float, Waiting]] = {}

    def waiting(self) -> list[Waiting]:
        """Those that have waited for a while."""
        return [pod for since, pod in self._seen.values() if self._clock() >= since + PATIENCE_SECONDS]

    def note(self, pod: Object, *, deleted: bool = False) -> None:
        """Takes what the watch showed; what it shows no more has a node, or is gone."""
        uid, wants = pod["metadata"]["uid"], None if deleted else waiting_of(pod)
        if wants is None:
            self._seen.pop(uid, None)
        else:
            self._seen[uid] = (self._seen[uid][0] if uid in self._seen else self._clock(), wants)

    async def run(self) -> None:
        """Watches for ever."""
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
        self._seen = {uid: seen for uid, seen in self._seen.items() if uid in there}
        return version


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
