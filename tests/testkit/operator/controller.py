"""A controller's loop over a simulated cluster."""

from datetime import UTC, datetime

from pipetransformer_operator.channel.limits.pulse import Pulse
from pipetransformer_operator.controller.loop import JobLoop, Pace
from pipetransformer_operator.controller.ports import (
    JobKey,
    LoopMetrics,
)
from pipetransformer_operator.controller.releases import Releases
from pipetransformer_operator.controller.slots import Slots
from tests.testkit.operator.shared_cluster import Cluster

KEY = JobKey("default", "digits")


NOW = datetime(2026, 1, 1, tzinfo=UTC)


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
