"""What Prometheus sees of the operator. Per-job series come from a live collector, so they vanish with their job."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipetransformer_contract.messages import ResizeReason

from ..api import PipeTrainingJob
from ..api.status import Reason
from ..channel.refusal import Refusal
from ..plan import Plan

PREFIX = "pipetransformer"
JOB_LABELS = ("namespace", "job")


class JobCollector(Collector):
    """Reads all jobs at each scrape."""

    def __init__(self, jobs: Callable[[], Iterable[PipeTrainingJob]]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """The series of each job."""
        held = _gauge("gpus_held", "Workers of the job whose pod is not gone; one accelerator each.")
        released = _gauge("gpus_released", "Workers that the job has given back since its start; never falls.")
        generation = _gauge("layout_generation", "Number of the newest published layout.")
        stages = _gauge("stages", "Stages a pipeline in the newest published layout (K).")
        pipelines = _gauge("pipelines", "Pipelines in the newest published layout (R).")
        frozen = _gauge("frozen_layers", "Blocks that no longer train.")
        for job in self._jobs():
            labels = (job.metadata.namespace, job.metadata.name)
            status = job.status
            held.add_metric(labels, status.gpus.held)
            released.add_metric(labels, status.gpus.released)
            generation.add_metric(labels, status.layout_generation)
            if status.plan is not None:
                stages.add_metric(labels, status.plan.stages)
                pipelines.add_metric(labels, status.plan.pipelines)
            if status.last_report is not None:
                frozen.add_metric(labels, status.last_report.boundary)
        yield from (held, released, generation, stages, pipelines, frozen)


class Metrics:
    """All metrics of one operator, in a registry of their own.

    Args:
        jobs: that the operator looks after.
        leading: whether it holds the lease.
    """

    def __init__(
        self, jobs: Callable[[], Iterable[PipeTrainingJob]], leading: Callable[[], bool] = lambda: True
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(JobCollector(jobs))
        leader = Gauge(
            f"{PREFIX}_leader",
            "1 while this operator holds the lease and may write, else 0: another holds it, or the API server is away.",
            registry=self.registry,
        )
        leader.set_function(lambda: float(leading()))
        reasons = ", ".join(reason.value for reason in ResizeReason)
        self._resizes = Counter(
            f"{PREFIX}_resizes", f"Published layouts by reason: {reasons}.", ("reason",), registry=self.registry
        )
        self._decisions = Counter(
            f"{PREFIX}_decisions",
            "Decisions as told in Kubernetes events, by reason: "
            + ", ".join(sorted(reason.value for reason in Reason)),
            ("reason",),
            registry=self.registry,
        )
        self._requests = Counter(
            f"{PREFIX}_channel_requests",
            "Requests of workers by path of the channel and HTTP status code.",
            ("path", "code"),
            registry=self.registry,
        )
        kinds = ", ".join(kind.label for kind in Refusal)
        self._refusals = Counter(
            f"{PREFIX}_channel_refusals",
            f"Requests of workers that were not served, by reason: {kinds}.",
            ("reason",),
            registry=self.registry,
        )

    def decided(self, job: PipeTrainingJob, plan: Plan) -> None:
        """Counts what a plan, made from `job`, has published and told."""
        published = plan.status.plan
        if published is not None and plan.status.layout_generation != job.status.layout_generation:
            self._resizes.labels(published.reason.value).inc()
        for event in plan.events:
            self._decisions.labels(event.reason.value).inc()

    def requested(self, path: str, code: int) -> None:
        """Counts a request to the channel."""
        self._requests.labels(path, str(code)).inc()

    def refused(self, kind: Refusal) -> None:
        """Counts a request that was not served."""
        self._refusals.labels(kind.label).inc()


def _gauge(name: str, help_text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_job_{name}", help_text, labels=JOB_LABELS)
