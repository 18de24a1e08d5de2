"""The real operator as a process, and the way between it and the API server, which can be cut or stalled."""

import asyncio
import contextlib
import itertools
import os
import random
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import yaml

from pipetransformer_operator.__main__ import main
from tests.testkit.forked import Forked

from .namespace import until

SYSTEM = "pipetransformer-system"
#: The number of this process of pytest-xdist, of which others run beside it.
PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


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
        self._process: Forked | None = None

    async def start(self) -> None:
        """Starts it and returns when its channel listens."""
        self._process = Forked(main, self.environment, self.log)

        async def listens() -> bool:
            assert self.running, f"the operator ended: {self.log.read_text()[-2000:]}"
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

    @property
    def connected(self) -> bool:
        """Whether anybody is connected to the API server by it."""
        return bool(self._open)

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


_ports = itertools.cycle(random.sample(range(22000 + PROCESS % 8, 32000, 8), 1250))


def free_port() -> int:
    """A port of loopback that nobody listens on, below those that the kernel gives to connections: whoever listens
    there may be killed, and come back to it. None comes twice before all others, and pytest's processes share none:
    nobody listens yet on what was given a moment ago."""
    for port in itertools.islice(_ports, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("a hundred ports of loopback are taken")
