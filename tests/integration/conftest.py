"""A real API server, the real operator as a process, and scripted trainers where a cluster would have nodes.

The control plane comes from `tools.devcluster`, beside any other that runs. Without a kubelet, `FakeKubelet` does for
workers' pods what one does: mounts, environment, tokens, a process, and its exit code in the pod's status.
"""

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import yaml

from pipetransformer_operator.api import GROUP, PLURAL, VERSION
from pipetransformer_operator.controller.ports import Conflict
from pipetransformer_operator.kube.api import APPLY_PATCH, MERGE_PATCH, Api, NotFound, Object
from pipetransformer_operator.kube.pods import WORKER_LABEL
from tests.builders import JobBuilder
from tests.kubelet import environment as environment_of
from tests.kubelet import token as token_of
from tools.devcluster import cluster
from tools.devcluster.layout import REPOSITORY, Layout

SCRIPTED = REPOSITORY / "tests" / "scripted_trainer.py"
CRD = REPOSITORY / "crds" / "training.pipetransformer.io_pipetrainingjobs.yaml"
SYSTEM = "pipetransformer-system"
POLL_SECONDS = 0.05


async def until(what: str, condition: Callable[[], Awaitable[Any]], timeout: float = 40) -> Any:
    """Asks again and again until the condition gives something true, and returns that."""
    try:
        async with asyncio.timeout(timeout):
            while not (result := await condition()):  # noqa: ASYNC110 - it waits for another process
                await asyncio.sleep(POLL_SECONDS)
            return result
    except TimeoutError:
        raise AssertionError(f"{what}: not within {timeout} s") from None


@pytest.fixture(scope="session")
def kubeconfig() -> Iterator[Path]:
    """The kubeconfig of an API server with our CRD, one for each process of pytest-xdist.

    Another PIPETRANSFORMER_TEST_PORT, the first of 20 a process, is another API server.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    port = int(os.environ.get("PIPETRANSFORMER_TEST_PORT", "17443")) + 20 * process
    layout = Layout(name=f"integration-{port}", port=port)
    was_up = cluster.is_up(layout)
    cluster.up_control_plane(layout, controllers=False)
    yield layout.kubeconfig
    if not was_up:
        cluster.down(layout)


@pytest.fixture
async def api(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """A client with all rights."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    client = await Api.connect()
    definition = yaml.safe_load(CRD.read_text())
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition['metadata']['name']}"
    await client.request("PATCH", path, definition, content_type=APPLY_PATCH)
    with contextlib.suppress(Conflict):
        await client.request("POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})

    async def served() -> bool:
        with contextlib.suppress(NotFound):
            await client.get(f"/apis/{GROUP}/{VERSION}/{PLURAL}")
            return True
        return False

    await until("the CRD is served", served)
    yield client
    await client.close()


class Namespace:
    """A namespace of the test's own: jobs and pods in it."""

    def __init__(self, api: Api, name: str, folder: Path) -> None:
        self.api = api
        self.name = name
        self.folder = folder
        self.jobs = f"/apis/{GROUP}/{VERSION}/namespaces/{name}/{PLURAL}"
        self.core = f"/api/v1/namespaces/{name}"

    async def apply(self, job: JobBuilder) -> None:
        """Creates the job; its record goes to the namespace's folder."""
        manifest = job.set("output", {"location": str(self.folder)}).manifest()
        manifest["metadata"]["namespace"] = self.name
        await self.api.request("POST", self.jobs, manifest)

    async def patch(self, job: str, spec: Object) -> None:
        """Edits the job's spec."""
        await self.api.request("PATCH", f"{self.jobs}/{job}", {"spec": spec}, content_type=MERGE_PATCH)

    async def status(self, job: str = "digits") -> Object:
        """The job's status."""
        status: Object = (await self.api.get(f"{self.jobs}/{job}")).get("status", {})
        return status

    async def pods(self) -> dict[str, Object]:
        """Pods by name."""
        return {pod["metadata"]["name"]: pod for pod in (await self.api.get(f"{self.core}/pods"))["items"]}

    async def told(self, *reasons: str) -> None:
        """Waits until there is an event of each reason; events are written after the status that they explain."""

        async def all_there() -> bool:
            events = (await self.api.get(f"{self.core}/events"))["items"]
            return set(reasons) <= {event["reason"] for event in events}

        await until(f"events {', '.join(reasons)}", all_there)

    async def clear(self) -> None:
        """Deletes its jobs and pods: nothing here collects garbage, and later operators would look after them."""
        await self.api.request("DELETE", self.jobs, {})
        await self.api.request("DELETE", f"{self.core}/pods", {"gracePeriodSeconds": 0})

    def advance(self, step: int, job: str = "digits") -> None:
        """Lets the job train up to `step`."""
        folder = self.folder / job
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "advance-to").write_text(str(step))

    async def layout(self, generation: int, job: str = "digits") -> tuple[int, int]:
        """Waits until the generation is confirmed; its (stages, pipelines)."""

        async def confirmed() -> Object | None:
            plan: Object | None = (await self.status(job)).get("plan")
            return plan if plan and plan.get("confirmedGeneration", 0) >= generation else None

        plan = await until(f"generation {generation} is confirmed", confirmed)
        return plan["stages"], plan["pipelines"]

    async def state(self, state: str, job: str = "digits") -> Object:
        """Waits for the job's state; its status."""

        async def reached() -> Object | None:
            status = await self.status(job)
            return status if status.get("state") == state else None

        result: Object = await until(f"state {state}", reached)
        return result


async def new_namespace(api: Api, folder: Path) -> Namespace:
    """A namespace that nobody else uses; jobs' records go to `folder`."""
    name = f"test-{secrets.token_hex(4)}"
    await api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    await api.request("POST", f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "default"}})
    return Namespace(api, name, folder)


@pytest.fixture
async def namespace(api: Api, tmp_path: Path) -> AsyncIterator[Namespace]:
    own = await new_namespace(api, tmp_path / "output")
    yield own
    await own.clear()


class Operator:
    """The operator as a process that can be killed and started again; it serves one namespace, or all."""

    def __init__(self, kubeconfig: Path, log: Path, *, identity: str = "operator", namespace: str = "") -> None:
        self.metrics_port = free_port()
        self.health_port = free_port()
        self.log = log
        port = free_port()
        self.environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "POD_NAMESPACE": SYSTEM,
            "POD_ID": identity,
            "PIPETRANSFORMER_LEASE_SECONDS": "6",
            "PIPETRANSFORMER_NAMESPACES": namespace,
            "PIPETRANSFORMER_HOST": "127.0.0.1",
            "PIPETRANSFORMER_CHANNEL_URL": f"https://127.0.0.1:{port}",
            "PIPETRANSFORMER_CHANNEL_PORT": str(port),
            "PIPETRANSFORMER_METRICS_PORT": str(self.metrics_port),
            "PIPETRANSFORMER_HEALTH_PORT": str(self.health_port),
        }
        self.channel_port = port
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts it and returns when its channel listens."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pipetransformer_operator", env=self.environment, stdout=log, stderr=log
            )

        async def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.channel_port)) == 0

        await until("the channel listens", listens)

    async def asked(self, path: str) -> int:
        """Status code of one of its health paths; 0 while it does not listen."""
        with contextlib.suppress(aiohttp.ClientError):
            url = f"http://127.0.0.1:{self.health_port}{path}"
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return response.status
        return 0

    async def figure(self, name: str) -> float:
        """A metric, as its line begins."""
        lines = (await self.figures()).splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))

    async def figures(self) -> str:
        """All metrics."""
        async with aiohttp.ClientSession() as session, session.get(self.metrics) as response:
            return await response.text()

    @property
    def metrics(self) -> str:
        """URL of its metrics."""
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    @property
    def running(self) -> bool:
        """Whether the process that was started last lives."""
        return self._process is not None and self._process.returncode is None

    async def generation(self, authority: str, token: str, job: str) -> int:
        """Status code of a worker's question for the newest generation."""
        trusted = ssl.create_default_context(cadata=authority)
        headers = {"Authorization": f"Bearer {token}", "X-Pipetransformer-Job": job}
        url = f"https://127.0.0.1:{self.channel_port}/v1/generation?after=0&timeoutSeconds=0"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers, ssl=trusted) as response:
            return response.status

    async def signal(self, number: int) -> None:
        """Sends it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def exit_code(self) -> int:
        """Waits for its end."""
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        """Ends it without notice."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@pytest.fixture
async def operator(api: Api, kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Operator]:
    running = Operator(kubeconfig, tmp_path / "operator.log")
    await running.start()
    yield running
    await running.kill()
    print((tmp_path / "operator.log").read_text())


class Wire:
    """The way to the API server, which can be cut: a kubeconfig that leads through a port of its own."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        content = yaml.safe_load(kubeconfig.read_text())
        cluster = content["clusters"][0]["cluster"]
        self._target = urlsplit(cluster["server"])
        self._port = free_port()
        cluster["server"] = f"https://127.0.0.1:{self._port}"
        self.kubeconfig = folder / "cut.kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(content))
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._stalled: set[asyncio.StreamWriter] = set()

    async def mend(self) -> None:
        """Lets requests through."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self._port)

    async def cut(self) -> int:
        """Breaks what is open, and refuses what comes; returns how many connections broke."""
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()
        return len(self._open) // 2

    def stall(self) -> None:
        """Nothing passes any more on what is open, and nobody is told; new connections are as they were."""
        self._stalled |= self._open

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        both = {writer, there_writer}
        self._open |= both

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    if target not in self._stalled:
                        target.write(data)
                        await target.drain()
            target.close()

        await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))
        self._open -= both


@pytest.fixture
async def wire(kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Wire]:
    way = Wire(kubeconfig, tmp_path)
    await way.mend()
    yield way
    await way.cut()


class FakeKubelet:
    """Runs a scripted trainer for each pod of a namespace and keeps the pods' status.

    Attributes:
        room: so many pods may be started in all; others find no node.
        command: what runs in every pod.
    """

    def __init__(self, namespace: Namespace, folder: Path) -> None:
        self._namespace = namespace
        self._folder = folder
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.room = 8192
        self.command: list[str | Path] = [sys.executable, SCRIPTED]
        self._addresses = (f"127.0.{number // 250}.{number % 250 + 2}" for number in itertools.count())
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Starts what was created and ends what was deleted, until cancelled."""
        while True:
            pods = {pod["metadata"]["uid"]: pod for pod in (await self._namespace.pods()).values()}
            for uid, pod in pods.items():
                worker = WORKER_LABEL in pod["metadata"].get("labels", {})
                if worker and uid not in self.processes and "phase" in pod.get("status", {}):
                    await (self._start(pod) if len(self.processes) < self.room else self._turn_away(pod))
            for uid in self.processes.keys() - pods.keys():
                with contextlib.suppress(ProcessLookupError):
                    self.processes[uid].kill()
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """Kills all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
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
        with (folder / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self.command, env=os.environ | environment, stdout=log, stderr=log
            )
        self.processes[uid] = process
        await self._set_status(name, {"phase": "Running", "podIP": address})
        self._tasks.append(asyncio.create_task(self._watch(name, process)))

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        code = 128 - code if code < 0 else code
        ended = {
            "name": "trainer",
            "state": {"terminated": {"exitCode": code}},
            "image": "",
            "imageID": "",
            "ready": False,
        }
        ended["restartCount"] = 0
        await self._set_status(name, {"phase": "Succeeded" if code == 0 else "Failed", "containerStatuses": [ended]})

    async def _set_status(self, name: str, status: Object) -> None:
        path = f"{self._namespace.core}/pods/{name}/status"
        with contextlib.suppress(NotFound):  # it was deleted meanwhile
            await self._namespace.api.request("PATCH", path, {"status": status}, content_type=MERGE_PATCH)


@pytest.fixture
async def kubelet(namespace: Namespace, tmp_path: Path) -> AsyncIterator[FakeKubelet]:
    fake = FakeKubelet(namespace, tmp_path / "pods")
    running = asyncio.create_task(fake.run())
    yield fake
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await fake.stop()


def free_port() -> int:
    """A port of loopback that nobody listens on, below those that the kernel gives to connections: whoever listens
    there may be killed, and come back to it."""
    for port in random.sample(range(22000, 32000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("a hundred ports of loopback are taken")
