"""A controller's loop over a simulated cluster."""

import asyncio
from datetime import UTC, datetime

from pipetransformer_operator.channel.limits.pulse import Pulse
from pipetransformer_operator.controller.loop import JobLoop, Pace
from pipetransformer_operator.controller.ports import (
    JobKey,
    LoopMetrics,
    TurnResult,
)
from pipetransformer_operator.controller.releases import Releases
from pipetransformer_operator.controller.slots import Slots
from tests.testkit.operator.shared_cluster import Cluster

KEY = JobKey("default", "digits")


NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Turns(LoopMetrics):
    """Counts the turns of a loop that the test has not waited for, and notes when the newest one ended."""

    def __init__(self) -> None:
        self._taken = asyncio.Semaphore(0)
        self.newest = 0.0

    def on_turned(self, result: TurnResult, seconds: float) -> None:
        self._taken.release()
        self.newest = asyncio.get_running_loop().time()

    async def taken(self, count: int = 1) -> None:
        """Waits until the loop took this many more turns."""
        for _ in range(count):
            await self._taken.acquire()

    def none(self) -> bool:
        """Whether the loop took no other turn."""
        return self._taken.locked()


def make_loop(
    cluster: Cluster,
    pace: Pace | None = None,
    metrics: LoopMetrics | None = None,
    pulse: Pulse | None = None,
    *,
    writes: int = 1,
) -> JobLoop:
    """The loop of the cluster's job, with this many writes at a time."""
    told, others = metrics or LoopMetrics(), pulse or Pulse()
    return JobLoop(KEY, cluster, cluster, lambda: NOW, pace or Pace(), told, others, Slots(writes), Releases())
