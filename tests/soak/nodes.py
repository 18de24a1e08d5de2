"""Nodes without a kubelet: for each pod that the scheduler binds to one, a real trainer process on this machine.

What matters here is what a kubelet does: tokens, environment, the pod's status, the grace period, the exit code and the
termination message, and that the object goes only once the process is gone. A node that is lost says nothing any more;
after a time its object is deleted, as a cloud does, and the control plane clears away what it held.
"""

import asyncio
import contextlib
import os
import signal
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from pipetransformer_contract.api.labels import WORKER_LABEL
from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.controller.ports import Conflict, Unavailable
from pipetransformer_operator.kube.client.api import NotFound
from tests.testkit import forked
from tests.testkit.operator import kubelet

from .draw import ACCELERATOR
from .patient import PatientApi
from .trainer import train
from .watch import Watch

POLL_SECONDS = 0.05
BEAT_SECONDS = 2
CLOUD_SECONDS = 15
ADDRESS = "127.0.0.1"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


@dataclass
class Worker:
    """A pod's process."""

    pod: Object
    process: ForkServerProcess
    deleted: asyncio.Event

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def job(self) -> str:
        return str(self.pod["metadata"]["ownerReferences"][0]["name"])

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process.exitcode is None

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal; it may have ended just now."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def stopped(self) -> bool:
        """Whether the kernel says that it is stopped."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False


class Nodes:
    """See the module.

    Args:
        api: with all rights.
        pods: the namespace's pods.
        namespace: of all jobs.
        folder: for what pods see of their node, and for logs.
        accelerators: of each node.
    """

    def __init__(self, api: PatientApi, pods: Watch, namespace: str, folder: Path, accelerators: int) -> None:
        self._api = api
        self._core = f"/api/v1/namespaces/{namespace}"
        self._folder = folder
        self._accelerators = accelerators
        self._pods = pods
        self._added = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._seen: set[str] = set()
        self._deleted: dict[str, asyncio.Event] = {}
        self._context = forked.context(*forked.TRAINER, "pipetransformer.worker.process", train.__module__)
        self.living: set[str] = set()
        self.workers: dict[str, Worker] = {}
        self.errors: list[str] = []
        pods.listeners.append(self._pod_changed)

    async def add(self) -> str:
        """A new node."""
        name = f"soak-node-{self._added}"
        self._added += 1
        labels = {"kubernetes.io/hostname": name}
        await self._api.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        room = {"cpu": "64", "memory": "512Gi", "pods": "110", ACCELERATOR: str(self._accelerators)}
        path = f"/api/v1/nodes/{name}/status"
        body = {"status": {"capacity": room, "allocatable": room}}
        await self._api.request("PATCH", path, body, content_type=MERGE_PATCH)
        renewed = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _now()}
        await self._api.request("POST", _LEASES, {"metadata": {"name": name}, "spec": renewed})
        self.living.add(name)
        return name

    async def run(self) -> None:
        """Keeps the nodes' leases fresh until cancelled."""
        while True:
            await asyncio.gather(*(self._beat(name) for name in self.living), asyncio.sleep(BEAT_SECONDS))

    def lose(self, name: str) -> list[Worker]:
        """The node falls silent with all that ran on it; returns that."""
        self.living.discard(name)
        lost = [worker for worker in self.workers.values() if worker.pod["spec"]["nodeName"] == name and worker.runs]
        for worker in lost:
            worker.signal(signal.SIGKILL)
        self._spawn(self._replace(name))
        return lost

    async def cordon(self, name: str, *, cordoned: bool) -> None:
        """Marks the node, as `kubectl cordon` and `uncordon` do."""
        with contextlib.suppress(NotFound):  # it was lost meanwhile
            body = {"spec": {"unschedulable": cordoned or None}}
            await self._api.request("PATCH", f"/api/v1/nodes/{name}", body, content_type=MERGE_PATCH)

    async def stop(self) -> None:
        """Ends all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers.values():
            worker.process.kill()
            worker.process.join()
        for number in range(self._added):
            for path in (f"/api/v1/nodes/soak-node-{number}", f"{_LEASES}/soak-node-{number}"):
                with contextlib.suppress(NotFound):
                    await self._api.request("DELETE", path)

    async def _beat(self, name: str) -> None:
        """Renews the lease, and says that the node is ready: a late lease makes the control plane doubt it."""
        lease = {"spec": {"renewTime": _now()}}
        ready = {"type": "Ready", "status": "True", "reason": "Soak", "lastHeartbeatTime": _now()}
        with contextlib.suppress(Unavailable):  # the next one is not far
            await self._api.once.request("PATCH", f"{_LEASES}/{name}", lease, content_type=MERGE_PATCH)
            status = {"status": {"conditions": [ready]}}
            await self._api.once.request("PATCH", f"/api/v1/nodes/{name}/status", status, content_type=STRATEGIC_PATCH)

    async def _replace(self, name: str) -> None:
        await self.add()
        await asyncio.sleep(CLOUD_SECONDS)
        with contextlib.suppress(NotFound):  # it was tried again, because the first answer was lost
            await self._api.request("DELETE", f"/api/v1/nodes/{name}")

    def _pod_changed(self, kind: str, pod: Object, _: float) -> None:
        uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName", "")
        if kind == "DELETED" or "deletionTimestamp" in pod["metadata"]:
            self._deleted.setdefault(uid, asyncio.Event()).set()
        if kind != "DELETED" and node in self.living and uid not in self._seen and WORKER_LABEL in _labels(pod):
            self._seen.add(uid)
            self._spawn(self._live(pod))

    def _spawn(self, life: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(life)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append("".join(traceback.format_exception(error)))

    async def _live(self, pod: Object) -> None:
        """A pod's life on its node."""
        uid, name, node = pod["metadata"]["uid"], pod["metadata"]["name"], pod["spec"]["nodeName"]
        deleted = self._deleted.setdefault(uid, asyncio.Event())
        if not deleted.is_set():
            try:
                await self._run(pod, deleted)
            except NotFound:  # it was deleted meanwhile
                return
        await deleted.wait()
        if node in self.living:
            with contextlib.suppress(NotFound, Conflict):
                body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                await self._api.request("DELETE", f"{self._core}/pods/{name}", body)

    async def _run(self, pod: Object, deleted: asyncio.Event) -> None:
        uid, name, node = pod["metadata"]["uid"], pod["metadata"]["name"], pod["spec"]["nodeName"]
        folder = self._folder / f"{name}-{uid}"
        folder.mkdir(parents=True)
        given = await kubelet.environment(self._api, pod, folder, address=ADDRESS, node=node)
        environment = given | {"TMPDIR": str(folder)}
        process = self._context.Process(target=train, args=(environment, str(folder / "log")), daemon=True)
        await asyncio.to_thread(process.start)  # the server of forks may just be importing torch
        self.workers[uid] = worker = Worker(pod, process, deleted)
        running = {"name": "trainer", "image": "trainer", "imageID": "", "restartCount": 0, "ready": True}
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": _now()}
        state = {"running": {"startedAt": _now()}}
        await self._set_status(
            name, {"phase": "Running", "podIP": ADDRESS, "containerStatuses": [running | {"state": state}]}, ready
        )
        ending: float | None = None
        clock = asyncio.get_running_loop().time
        while worker.runs:
            if deleted.is_set() and ending is None:
                worker.signal(signal.SIGTERM)
                ending = clock() + pod["spec"]["terminationGracePeriodSeconds"]
            if ending is not None and clock() > ending:
                worker.signal(signal.SIGKILL)
            await asyncio.sleep(POLL_SECONDS)
        if node not in self.living:
            return
        code = process.exitcode or 0
        said = folder / "termination-log"
        message = said.read_text() if said.exists() else ""
        terminated = {"exitCode": 128 - code if code < 0 else code, "message": message, "finishedAt": _now()}
        ended = running | {"ready": False, "state": {"terminated": terminated}}
        phase = "Succeeded" if code == 0 else "Failed"
        await self._set_status(name, {"phase": phase, "containerStatuses": [ended]}, ready | {"status": "False"})

    async def _set_status(self, name: str, status: Object, ready: Object) -> None:
        with contextlib.suppress(NotFound):  # it was deleted meanwhile
            body = {"status": status | {"conditions": [ready]}}
            path = f"{self._core}/pods/{name}/status"
            await self._api.request("PATCH", path, body, content_type=STRATEGIC_PATCH)


def _labels(pod: Object) -> Object:
    labels: Object = pod["metadata"].get("labels", {})
    return labels


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
