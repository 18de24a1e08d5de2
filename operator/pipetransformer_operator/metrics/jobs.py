"""Series of single jobs. They are read from the jobs at each scrape, so they end with the job."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.status import ConditionType, JobStatus, State
from pipetransformer_operator.clocks import Clock

from .idle import IdleReason
from .names import JOB_LABELS, PREFIX

#: A job's value of a metric; None if it has none now.
Figure = Callable[[JobStatus, datetime], float | None]


def _quota(status: JobStatus, *, admitted: bool) -> float | None:
    requests = status.quota_requests
    return sum(request.granted for request in requests if request.admitted is admitted) if requests else None


_GAUGES: dict[str, tuple[str, Figure]] = {
    "gpus_held": (
        "Workers of the job whose pod still exists; one accelerator each.",
        lambda status, now: status.gpus.held,
    ),
    "gpus_leaving": (
        "Workers that left the layout, kept until a durable checkpoint contains its frozen layers.",
        lambda status, now: len(status.leaving_ids),
    ),
    "workers_initial": (
        "Workers with which the job would start if nothing limited it: the baseline of savings.",
        lambda status, now: status.initial_workers or None,
    ),
    "layout_generation": (
        "Number of the newest published layout.",
        lambda status, now: status.layout_generation,
    ),
    "stages": (
        "Stages of each pipeline in the newest published layout (K).",
        lambda status, now: status.generation.stages if status.generation else None,
    ),
    "pipelines": (
        "Pipelines in the newest published layout (R).",
        lambda status, now: status.generation.pipelines if status.generation else None,
    ),
    "layers": (
        "Layers of the model.",
        lambda status, now: status.last_report.num_layers if status.last_report else None,
    ),
    "frozen_layers": (
        "Frozen layers: those that no longer train.",
        lambda status, now: status.last_report.boundary if status.last_report else None,
    ),
    "step": (
        "Committed steps, from the job's status: up to half a minute late, and later with more than 300 jobs.",
        lambda status, now: status.last_report.step if status.last_report else None,
    ),
    "checkpoint_step": (
        "Step of the newest durable checkpoint.",
        lambda status, now: status.checkpoint.step if status.checkpoint else None,
    ),
    "checkpoint_timestamp_seconds": (
        "When the newest durable checkpoint became known to the operator, seconds since the epoch.",
        lambda status, now: status.checkpoint_time.timestamp() if status.checkpoint_time else None,
    ),
    "checkpoint_pause_seconds": (
        "Seconds that training paused for the newest durable checkpoint.",
        lambda status, now: status.checkpoint.pause_seconds if status.checkpoint else None,
    ),
    "checkpoint_write_seconds": (
        "Seconds from the beginning of the newest durable checkpoint until it was durable.",
        lambda status, now: status.checkpoint.write_seconds if status.checkpoint else None,
    ),
    "checkpoint_fails": (
        "1 while the storage does not take the job's checkpoint, otherwise 0.",
        lambda status, now: status.is_true(ConditionType.UNSAVED),
    ),
    "quota_granted": (
        "Workers that the job's queue granted, without those whose quota was returned. Only for jobs with a queue.",
        lambda status, now: _quota(status, admitted=True),
    ),
    "quota_waiting": (
        "Workers that the job requested from its queue, which has not granted them. Only for jobs with a queue.",
        lambda status, now: _quota(status, admitted=False),
    ),
    "failures_counted": (
        "Failures that count against runPolicy.backoffLimit now; each expires after forgetFailuresAfterSteps.",
        lambda status, now: len(status.failure_steps),
    ),
    "resize_failures": (
        "Consecutive failed changes of layout; each doubles the wait for the next attempt.",
        lambda status, now: status.resize_failures,
    ),
}
_COUNTERS: dict[str, tuple[str, Figure]] = {
    "gpus_released": (
        "Workers that the job released while it trained.",
        lambda status, now: status.gpus.released,
    ),
    "saved_gpu_seconds": (
        "GPU-seconds that packing made available to other jobs; its rate is the number of GPUs saved now.",
        JobStatus.gpu_seconds_saved_at,
    ),
    "failures": (
        "Failed workers and broken generations since the job was created. A silent worker counts even if the cluster"
        " shows later that its node was lost.",
        lambda status, now: status.failures,
    ),
    "redone_steps": (
        "Steps that were committed and then trained again, because nothing held their state any more.",
        lambda status, now: status.redone_steps,
    ),
    "node_losses": (
        "Nodes that were lost while they ran members of the job.",
        lambda status, now: status.node_losses,
    ),
}


class ManagedJobs(Protocol):
    """Knows the jobs that the operator manages."""

    def jobs(self) -> Iterable[PipeTrainingJob]:
        """The jobs, as last read or written."""
        ...


@dataclass(frozen=True)
class Seen:
    """What the newest turn of a job showed in addition to its status.

    Attributes:
        pending: workers of the layout without a node.
        idle: accelerators that are held without training, by reason.
        returns: how often the job returned to the layout before.
    """

    pending: int = 0
    idle: Mapping[IdleReason, int] = field(default_factory=dict)
    returns: int = 0


_UNSEEN = Seen()


class JobCollector(Collector):
    """Reads all jobs at each scrape.

    Args:
        source: knows the jobs.
        seen: what their newest turns showed, by (namespace, name) of the job.
        clock: the present time, with its time zone.
    """

    def __init__(
        self,
        source: ManagedJobs,
        seen: Mapping[tuple[str, str], Seen],
        clock: Clock,
    ) -> None:
        self._source = source
        self._seen = seen
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yields the series of each job."""
        now = self._clock()
        families: list[tuple[GaugeMetricFamily | CounterMetricFamily, Figure]] = [
            *((_gauge(name, help_text), figure) for name, (help_text, figure) in _GAUGES.items()),
            *((_counter(name, help_text), figure) for name, (help_text, figure) in _COUNTERS.items()),
        ]
        pending = _gauge("gpus_pending", "Workers of the layout that have no node yet or are not created.")
        returns = _counter(
            "layout_returns",
            "Times that the job changed, by choice, to the layout that it had chosen to leave last.",
        )
        idle = GaugeMetricFamily(
            f"{PREFIX}_job_gpus_idle",
            f"Accelerators that the job holds without training on them, by reason: {', '.join(IdleReason)}.",
            labels=(*JOB_LABELS, "reason"),
        )
        state = GaugeMetricFamily(
            f"{PREFIX}_job_state", f"1 for the job's present state: {', '.join(State)}.", labels=(*JOB_LABELS, "state")
        )
        for job in self._source.jobs():
            labels = (job.metadata.namespace, job.metadata.name)
            for family, figure in families:
                value = figure(job.status, now)
                if value is not None:
                    family.add_metric(labels, value)
            seen = self._seen.get(labels, _UNSEEN)
            pending.add_metric(labels, seen.pending)
            returns.add_metric(labels, seen.returns)
            for reason, gpus in seen.idle.items():
                idle.add_metric((*labels, reason.value), gpus)
            state.add_metric((*labels, job.status.state.value), 1)
        yield from (family for family, _ in families)
        yield from (pending, idle, returns, state)


def _gauge(name: str, help_text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_job_{name}", help_text, labels=JOB_LABELS)


def _counter(name: str, help_text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}_job_{name}", help_text, labels=JOB_LABELS)
