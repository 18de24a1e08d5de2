"""The control plane, the fake nodes and the operator's process of one run, and what each of them costs."""

import asyncio
import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import yaml

from pipetransformer_contract.api import GROUP, PLURAL, VERSION
from pipetransformer_operator.kube.client.api import NotFound
from tests.testkit.cluster.api_server import ApiServer
from tests.testkit.operator.operating import PROCESS, free_port
from tools.devcluster import cluster, controlplane, gobuild
from tools.devcluster.layout import REPOSITORY, Layout

SYSTEM = "pipetransformer-system"
CRD = REPOSITORY / "crds" / f"training.pipetransformer.io_{PLURAL}.yaml"
START_SECONDS = 60
_TICKS = os.sysconf("SC_CLK_TCK")
_REQUESTS = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@contextlib.asynccontextmanager
async def control_plane(version: str = gobuild.KUBERNETES) -> AsyncIterator[Layout]:
    """An empty control plane of this process's own, whatever a run left that was killed. It is removed at the end, and
    its ports are beyond those of tests that run beside it."""
    port = int(os.environ.get("PIPETRANSFORMER_TEST_PORT", "17443")) + 300 + 20 * PROCESS
    layout = Layout(name=f"scale-{port}", port=port)
    with cluster.held(layout):
        await asyncio.to_thread(cluster.down, layout)
        try:
            await asyncio.to_thread(cluster.up_control_plane, layout, fake_nodes=True, version=version)
            yield layout
        finally:
            await asyncio.to_thread(cluster.down, layout)


async def install(api: ApiServer) -> None:
    """The CRD, and the operator's namespace."""
    definition = yaml.safe_load(CRD.read_text())
    await api.send("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    await api.send("POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})
    await _served(api, f"/apis/{GROUP}/{VERSION}/{PLURAL}")


async def make_namespaces(api: ApiServer, names: list[str]) -> None:
    """Namespaces that can hold pods."""
    for name in names:
        await api.send("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    for name in names:
        await _served(api, f"/api/v1/namespaces/{name}/serviceaccounts/default")


async def _served(api: ApiServer, path: str) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            with contextlib.suppress(NotFound):
                await api.send("GET", path)
                return
            await asyncio.sleep(0.1)


def processor_seconds(layout: Layout, **others: int) -> dict[str, float]:
    """What each part of the control plane has used since its start, and other processes by their ids."""
    pids = {**controlplane.alive(layout), **others}
    return {name: _cpu_seconds(pid) for name, pid in pids.items() if pid is not None}


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Processor seconds between two looks."""
    return {name: round(value - before.get(name, 0.0), 1) for name, value in after.items()}


async def requests(api: ApiServer) -> Counter[str]:
    """Requests that the API server has answered, of anybody, by verb and resource."""
    counted: Counter[str] = Counter()
    for labels, count in _REQUESTS.findall(await api.text("/metrics")):
        fields = dict(_LABEL.findall(labels))
        if fields["resource"] and fields["verb"] != "WATCH":
            resource = "/".join(filter(None, (fields["resource"], fields["subresource"])))
            counted[f"{fields['verb']} {resource}"] += int(float(count))
    return counted


class OperatorProcess:
    """The operator as it is shipped, on ports of loopback, with further variables of its environment."""

    def __init__(self, layout: Layout, log: Path, **environment: str) -> None:
        self._layout = layout
        self._log = log
        self._environment = environment
        self.channel_port, self.metrics_port, self.health_port = free_port(), free_port(), free_port()

    async def __aenter__(self) -> "OperatorProcess":
        environment = os.environ | {
            "KUBECONFIG": str(self._layout.kubeconfig),
            "POD_NAMESPACE": SYSTEM,
            "POD_ID": "operator",
            "PIPETRANSFORMER_NAMESPACES": "",
            "PIPETRANSFORMER_HOST": "127.0.0.1",
            "PIPETRANSFORMER_CHANNEL_URL": f"https://localhost:{self.channel_port}",
            "PIPETRANSFORMER_CHANNEL_PORT": str(self.channel_port),
            "PIPETRANSFORMER_METRICS_PORT": str(self.metrics_port),
            "PIPETRANSFORMER_HEALTH_PORT": str(self.health_port),
            **self._environment,
        }
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pipetransformer_operator", env=environment, stdout=log, stderr=log
            )
        async with asyncio.timeout(START_SECONDS):
            while not await self._ready():  # noqa: ASYNC110 - it waits for another process
                await asyncio.sleep(0.1)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._process.kill()
        await self._process.wait()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def _ready(self) -> bool:
        if self._process.returncode is not None:
            raise RuntimeError(f"the operator ended with {self._process.returncode}: {self._log.read_text()[-2000:]}")
        with contextlib.suppress(OSError):
            return b" 200 " in await _get(self.health_port, "/readyz")
        return False

    async def metrics(self) -> str:
        """Its metrics, as Prometheus reads them."""
        return (await _get(self.metrics_port, "/metrics")).decode().partition("\r\n\r\n")[2]

    @property
    def peak_mb(self) -> float:
        """Its largest resident size so far, 10^6 bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024 / 1e6


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def _get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return await reader.read()
    finally:
        writer.close()
