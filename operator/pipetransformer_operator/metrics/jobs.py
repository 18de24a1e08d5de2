"""Series of single jobs, read from the jobs themselves at each scrape: they vanish with their job."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.status import JobStatus, State
from pipetransformer_operator.plan.rules.accounting import gpu_seconds_saved

from .names import JOB_LABELS, PREFIX

#: What one job is worth of a metric; None when it has no such figure now.
Figure = Callable[[JobStatus, datetime], float | None]


def _quota(status: JobStatus, *, admitted: bool) -> float | None:
    requests = status.quota_requests
    return sum(request.granted for request in requests if request.admitted is admitted) if requests else None


_GAUGES: dict[str, tuple[str, Figure]] = {
    "gpus_held": (
        "Workers of the job whose pod is not gone; one accelerator each.",
        lambda status, now: status.gpus.held,
    ),
    "gpus_leaving": (
        "Workers that have left the layout and are kept until a durable checkpoint knows its boundary.",
        lambda status, now: len(status.leaving_ids),
    ),
    "workers_initial": (
        "Workers of a start that no ceiling limits: what savings are measured against.",
        lambda status, now: status.initial_workers or None,
    ),
    "layout_generation": (
        "Number of the newest published layout.",
        lambda status, now: status.layout_generation,
    ),
    "stages": (
        "Stages a pipeline in the newest published layout (K).",
        lambda status, now: status.generation.stages if status.generation else None,
    ),
    "pipelines": (
        "Pipelines in the newest published layout (R).",
        lambda status, now: status.generation.pipelines if status.generation else None,
    ),
    "layers": (
        "Blocks of the model.",
        lambda status, now: status.last_report.num_layers if status.last_report else None,
    ),
    "frozen_layers": (
        "Blocks that no longer train.",
        lambda status, now: status.last_report.boundary if status.last_report else None,
    ),
    "step": (
        "Committed steps, as the status knows them: up to half a minute late, more where over 300 jobs run.",
        lambda status, now: status.last_report.step if status.last_report else None,
    ),
    "checkpoint_step": (
        "Step of the newest durable checkpoint.",
        lambda status, now: status.checkpoint.step if status.checkpoint else None,
    ),
    "quota_granted": (
        "Workers that the job's queue granted, less those whose quota was returned; of jobs with a queue.",
        lambda status, now: _quota(status, admitted=True),
    ),
    "quota_waiting": (
        "Workers that the job's queue is asked for and has not granted; of jobs with a queue.",
        lambda status, now: _quota(status, admitted=False),
    ),
    "failures_counted": (
        "Failures that count against runPolicy.backoffLimit now; forgotten after forgetFailuresAfterSteps.",
        lambda status, now: len(status.failure_steps),
    ),
    "resize_failures": (
        "Changes of layout that failed in a row; each doubles the wait for the next.",
        lambda status, now: status.resize_failures,
    ),
}
_COUNTERS: dict[str, tuple[str, Figure]] = {
    "gpus_released": (
        "Workers that the job has given back while it trained.",
        lambda status, now: status.gpus.released,
    ),
    "saved_gpu_seconds": (
        "GPU-seconds that packing left to others; its rate is GPUs saved now.",
        gpu_seconds_saved,
    ),
    "failures": (
        "Failures of workers, and generations that broke, since the job was created; not the loss of a node.",
        lambda status, now: status.failures,
    ),
    "node_losses": (
        "Nodes that were lost with members of the job.",
        lambda status, now: status.node_losses,
    ),
}


class JobCollector(Collector):
    """Reads all jobs at each scrape.

    Args:
        jobs: that the operator looks after.
        pending: workers of a job that no node runs yet, by (namespace, name), as last observed.
        clock: the present time, aware of its zone.
    """

    def __init__(
        self,
        jobs: Callable[[], Iterable[PipeTrainingJob]],
        pending: Mapping[tuple[str, str], int],
        clock: Callable[[], datetime],
    ) -> None:
        self._jobs = jobs
        self._pending = pending
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """The series of each job."""
        now = self._clock()
        families: list[tuple[GaugeMetricFamily | CounterMetricFamily, Figure]] = [
            *((_gauge(name, help_text), figure) for name, (help_text, figure) in _GAUGES.items()),
            *((_counter(name, help_text), figure) for name, (help_text, figure) in _COUNTERS.items()),
        ]
        pending = _gauge("gpus_pending", "Workers that ought to run and have no node yet, or are not created.")
        states = ", ".join(state.value for state in State)
        state = GaugeMetricFamily(
            f"{PREFIX}_job_state", f"1 for the state that the job is in: {states}.", labels=(*JOB_LABELS, "state")
        )
        for job in self._jobs():
            labels = (job.metadata.namespace, job.metadata.name)
            for family, figure in families:
                value = figure(job.status, now)
                if value is not None:
                    family.add_metric(labels, value)
            pending.add_metric(labels, self._pending.get(labels, 0))
            state.add_metric((*labels, job.status.state.value), 1)
        yield from (family for family, _ in families)
        yield from (pending, state)


def _gauge(name: str, help_text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_job_{name}", help_text, labels=JOB_LABELS)


def _counter(name: str, help_text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}_job_{name}", help_text, labels=JOB_LABELS)
