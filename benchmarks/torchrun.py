"""Drives the baseline of bench-regroup: torchrun agents that come and go, and the pauses that this makes.

One agent a worker, as one pod a worker would have it. The pause of a change of size runs from the end of the last step
of the old world to the end of the first step of the new one, less a median steady step of the new one.
"""

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: torch 2.13 caches the store of the previous attempt; without this a scale-down can hang (docs/decisions/0002).
_WORKAROUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

#: As quick as it goes without a heartbeat lost on a busy machine (two seconds and less split the world in two).
BEST: Mapping[str, str] = {"last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "3"}


@dataclass
class TorchrunJob:
    """A job of elastic torchrun agents on this machine.

    Args:
        folder: for logs and checkpoints.
        spec: file with the JSON of a TrainerSpec.
        stages: workers a pipeline.
        sizes: least and largest number of agents.
        settings: the rendezvous' configuration.
        monitor_interval: seconds between an agent's looks at its workers.
    """

    folder: Path
    spec: Path
    stages: int
    sizes: tuple[int, int]
    settings: Mapping[str, str]
    monitor_interval: float
    port: int = 0
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "checkpoint").mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def start(self, count: int) -> None:
        """Start agents; the first of all hosts the rendezvous."""
        for _ in range(count):
            number = len(self.agents)
            command = [
                sys.executable, "-m", "torch.distributed.run",
                f"--nnodes={self.sizes[0]}:{self.sizes[1]}", "--nproc-per-node=1", "--max-restarts=100",
                "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=bench",
                "--local-addr=127.0.0.1", f"--monitor-interval={self.monitor_interval}",
            ]  # fmt: skip
            if self.settings:
                command.append("--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in self.settings.items()))
            command += ["-m", "benchmarks.torchrun_worker", f"--spec={self.spec}", f"--stages={self.stages}"]
            command += [f"--checkpoint={self.folder / 'checkpoint'}", f"--steps-log={self.folder / f'{number}.jsonl'}"]
            environment = os.environ | _WORKAROUND | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            with (self.folder / f"{number}.log").open("wb") as log:
                agent = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            self.agents.append(agent)
            if number == 0:  # whoever binds the port first hosts, and the host must not be one that leaves
                wait_until(self._listens, 60, lambda: f"the rendezvous of the first agent (logs in {self.folder})")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def leave(self, count: int) -> None:
        """Stop the newest agents as Kubernetes stops a pod: SIGTERM."""
        for agent in [agent for agent in self.agents if agent.poll() is None][-count:]:
            agent.terminate()

    def stop(self) -> None:
        """End everything that was started: an agent ends its workers, which have sessions of their own."""
        self.leave(len(self.agents))
        for agent in self.agents:
            agent.wait(timeout=60)

    def steps(self, world: int, after: float = 0.0) -> list[float]:
        """Times at which a world of that size ended a step (by its slowest rank), after a moment."""
        ends: dict[tuple[str, int], list[float]] = {}
        for log in self.folder.glob("*.jsonl"):
            for line in log.read_text().splitlines():
                entry = json.loads(line)
                if entry["world"] == world and entry["time"] > after:
                    ends.setdefault((entry["attempt"], entry["step"]), []).append(entry["time"])
        return sorted(max(times) for times in ends.values() if len(times) == world)

    def wait_steps(self, world: int, count: int, after: float, timeout: float) -> list[float]:
        """Wait for `count` steps of a world of that size after a moment.

        Raises:
            TimeoutError: they did not come; names the folder of the logs.
        """
        wait_until(
            lambda: len(self.steps(world, after)) >= count,
            timeout,
            lambda: f"{count} steps of {world} torchrun workers (logs in {self.folder})",
        )
        return self.steps(world, after)

    def pause(self, old_world: int, new_world: int, after: float, *, steady_steps: int, timeout: float = 180) -> float:
        """Seconds of the pause of the change of size that was begun at `after`."""
        new = self.wait_steps(new_world, steady_steps + 1, after, timeout)
        last_old = max(end for end in self.steps(old_world) if end < new[0])
        return pause_seconds(last_old, new)


def pause_seconds(last_old: float, new: list[float]) -> float:
    """End of the last old step to end of the first new one, less the median steady new step."""
    return new[0] - last_old - statistics.median(b - a for a, b in itertools.pairwise(new))


def wait_until(condition: Callable[[], bool], timeout: float, what: Callable[[], str]) -> None:
    """Poll a condition.

    Raises:
        TimeoutError: it did not become true in time.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:.0f} s for {what()}")
        time.sleep(0.02)
