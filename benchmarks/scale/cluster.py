"""The control plane, the fake nodes and the operator's process of one run, and what each of them costs."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.api_server import ApiServer, NotFound
from pipetransformer_operator.api import GROUP, PLURAL, VERSION
from tools.devcluster import cluster, controlplane
from tools.devcluster.layout import REPOSITORY, Layout

SYSTEM = "pipetransformer-system"
CRD = REPOSITORY / "crds" / f"training.pipetransformer.io_{PLURAL}.yaml"
START_SECONDS = 60
_TICKS = os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def control_plane() -> AsyncIterator[Layout]:
    """A control plane of its own; ports as the tests', a few further. It is stopped and removed at the end."""
    port = int(os.environ.get("PIPETRANSFORMER_TEST_PORT", "17443")) + 10
    layout = Layout(name=f"scale-{port}", port=port)
    await asyncio.to_thread(cluster.up_control_plane, layout, fake_nodes=True)
    try:
        yield layout
    finally:
        await asyncio.to_thread(cluster.down, layout)


async def install(api: ApiServer, namespaces: list[str]) -> None:
    """The CRD, and namespaces that can hold pods."""
    definition = yaml.safe_load(CRD.read_text())
    await api.send("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    for name in (SYSTEM, *namespaces):
        await api.send("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    async with asyncio.timeout(START_SECONDS):
        for path in (
            f"/apis/{GROUP}/{VERSION}/{PLURAL}",
            *(f"/api/v1/namespaces/{name}/serviceaccounts/default" for name in namespaces),
        ):
            while True:
                with contextlib.suppress(NotFound):
                    await api.send("GET", path)
                    break
                await asyncio.sleep(0.1)


@dataclass(frozen=True)
class Cost:
    """Processor seconds of each process since its start, and the operator's memory.

    Attributes:
        seconds: by name.
        operator_peak_mb: the operator's largest resident size so far, 10^6 bytes.
    """

    seconds: dict[str, float]
    operator_peak_mb: float

    def since(self, before: "Cost") -> dict[str, float]:
        """Processor seconds between two looks."""
        return {name: round(value - before.seconds.get(name, 0.0), 1) for name, value in self.seconds.items()}


class OperatorProcess:
    """The operator as it is shipped, on ports of loopback."""

    def __init__(self, layout: Layout, log: Path) -> None:
        self._layout = layout
        self._log = log
        self.channel_port, self.metrics_port, self.health_port = _free_ports(3)

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

    def cost(self) -> Cost:
        """What all processes have used; the workers and fake nodes are this very process."""
        pids: dict[str, int | None] = {**controlplane.alive(self._layout), "operator": self.pid, "clients": os.getpid()}
        seconds = {name: _cpu_seconds(pid) for name, pid in pids.items() if pid is not None}
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        return Cost(seconds, peak * 1024 / 1e6)


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


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
