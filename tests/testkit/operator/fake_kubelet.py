"""What a kubelet does for workers' pods, where none runs: mounts, environment, tokens, a process, its exit code."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from pipetransformer_contract.api.labels import WORKER_LABEL
from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.kube.client.api import NotFound
from tests.testkit.forked import Forked
from tests.testkit.operator import scripted_trainer
from tests.testkit.operator.kubelet import environment as environment_of
from tests.testkit.operator.kubelet import token as token_of

from .namespace import POLL_SECONDS, Namespace
from .operating import PROCESS


def real_trainer() -> None:
    """A real trainer as the program of pods, whose torch only its own process imports."""
    from pipetransformer.__main__ import main

    main()


class FakeKubelet:
    """Runs a scripted trainer for each pod of a namespace and keeps the pods' status.

    Attributes:
        room: so many pods may be started in all; others find no node.
        program: what runs in every pod.
    """

    def __init__(self, namespace: Namespace, folder: Path) -> None:
        self._namespace = namespace
        self._folder = folder
        self.processes: dict[str, Forked] = {}
        self.room = 8192
        self.program: Callable[[], int | None] = scripted_trainer.main
        self._addresses = (f"127.{PROCESS}.{number // 250}.{number % 250 + 2}" for number in itertools.count())
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Starts what was created and ends what was deleted, until cancelled."""
        while True:
            pods = {pod["metadata"]["uid"]: pod for pod in (await self._namespace.pods()).values()}
            for uid, pod in pods.items():
                worker = WORKER_LABEL in pod["metadata"].get("labels", {})
                if worker and uid not in self.processes and "phase" in pod.get("status", {}):
                    with contextlib.suppress(NotFound):  # it was deleted meanwhile
                        await (self._start(pod) if len(self.processes) < self.room else self._turn_away(pod))
            for uid in self.processes.keys() - pods.keys():
                self.processes[uid].kill()
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """Kills all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self.processes.values():
            process.kill()
            await process.wait()

    async def token(self, pod: Object) -> str:
        """A token as the pod's projected volume would hold it."""
        return await token_of(self._namespace.api, pod)

    async def _turn_away(self, pod: Object) -> None:
        if not pod["status"].get("conditions"):
            no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node is left"}
            await self._set_status(pod["metadata"]["name"], {"conditions": [no]})

    async def _start(self, pod: Object) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        folder = self._folder / name
        folder.mkdir(parents=True)
        address = next(self._addresses)
        environment = await environment_of(self._namespace.api, pod, folder, address=address, node="fake")
        self.processes[uid] = process = Forked(self.program, os.environ | environment, folder / "log")
        await self._set_status(name, {"phase": "Running", "podIP": address})
        self._tasks.append(asyncio.create_task(self._watch(name, process)))

    async def _watch(self, name: str, process: Forked) -> None:
        code = await process.wait()
        code = 128 - code if code < 0 else code
        ended = {
            "name": "trainer",
            "state": {"terminated": {"exitCode": code}},
            "image": "",
            "imageID": "",
            "ready": False,
            "restartCount": 0,
        }
        await self._set_status(name, {"phase": "Succeeded" if code == 0 else "Failed", "containerStatuses": [ended]})

    async def _set_status(self, name: str, status: Object) -> None:
        path = f"{self._namespace.core}/pods/{name}/status"
        with contextlib.suppress(NotFound):  # it was deleted meanwhile
            await self._namespace.api.request("PATCH", path, {"status": status}, content_type=MERGE_PATCH)
