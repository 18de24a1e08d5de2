"""Pods of other owners that find no node, by a watch of those pods alone that have none."""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from urllib.parse import urlencode

from ..controller.ports import Conflict, Unavailable
from ..plan import Waiting
from ..plan.accounting import JOB_LABEL
from .api import Api, NotFound, Object
from .quantity import whole

logger = logging.getLogger(__name__)
_QUERY = urlencode({"fieldSelector": "spec.nodeName=,status.phase=Pending", "labelSelector": f"!{JOB_LABEL}"})
PATH = f"/api/v1/pods?{_QUERY}"
WATCH_SECONDS = 120
RETRY_SECONDS = 10.0
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
        while True:
            try:
                listed = await self._api.get(PATH)
                there = {pod["metadata"]["uid"] for pod in listed["items"]}
                self._seen = {uid: seen for uid, seen in self._seen.items() if uid in there}
                for pod in listed["items"]:
                    self.note(pod)
                version = listed["metadata"]["resourceVersion"]
                async for event in self._api.watch(PATH, version, WATCH_SECONDS):
                    self.note(event["object"], deleted=event["type"] == "DELETED")
            except (Conflict, NotFound, Unavailable) as error:
                logger.warning("pods of others are not seen now: %s; again in %g s", error, RETRY_SECONDS)
                await asyncio.sleep(RETRY_SECONDS)


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
