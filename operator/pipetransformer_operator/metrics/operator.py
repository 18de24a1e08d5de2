"""The metrics of one operator: what its loops, its channel and its requests to the API server do."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.status import Reason
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_contract.wire import Path
from pipetransformer_operator.channel.listener import ChannelListener
from pipetransformer_operator.channel.refusal import Refusal
from pipetransformer_operator.controller.ports import JobKey, Recorder, TurnResult
from pipetransformer_operator.plan import Observed, Plan, WorkerPhase

from .jobs import JobCollector
from .names import PREFIX
from .resizes import Resizes

_QUICK_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_REQUEST_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15)
_WATCH = "watch"


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Metrics(Recorder, ChannelListener):
    """All metrics of one operator, in a registry of their own.

    Args:
        jobs: that the operator looks after.
        leading: whether it holds the lease.
        watches: by resource, when its watch was last opened (of several the one that was longest ago), seconds since
            the epoch.
        connections: how many workers' connections to the channel are open.
        clock: the present time, aware of its zone.
        avoided: by name, until when no worker is sent to nodes on which accelerators failed.
    """

    def __init__(
        self,
        jobs: Callable[[], Iterable[PipeTrainingJob]],
        leading: Callable[[], bool] = lambda: True,
        watches: Callable[[], Mapping[str, float]] = dict,
        connections: Callable[[], int] = lambda: 0,
        clock: Callable[[], datetime] = _utc_now,
        avoided: Callable[[], Mapping[str, datetime]] = dict,
    ) -> None:
        # A second series for each first one, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._pending: dict[tuple[str, str], int] = {}
        self._resizes = Resizes(self.registry)
        self.registry.register(JobCollector(jobs, self._pending, clock))
        self.registry.register(_WatchCollector(watches))
        self.registry.register(_AvoidedCollector(avoided))
        ProcessCollector(registry=self.registry)
        build = self._gauge("build_info", "1, with the version of this operator.", ("version",))
        build.labels(version("pipetransformer-operator")).set(1)
        self._gauge(
            "leader",
            "1 while this operator holds the lease and may write, else 0: another holds it, or the API server is away.",
        ).set_function(lambda: float(leading()))
        self._turns = self._counter(
            "reconciles", f"Turns of jobs' loops by result: {_values(TurnResult)}.", ("result",)
        )
        self._turn_seconds = self._histogram(
            "reconcile_seconds", "Seconds of a turn of a job's loop: observe, plan, write.", buckets=_REQUEST_SECONDS
        )
        self._plan_seconds = self._histogram(
            "plan_seconds", "Seconds of a turn in which the plan was made, without any I/O.", buckets=_QUICK_SECONDS
        )
        self._report_seconds = self._histogram(
            "report_seconds",
            "Seconds from a leader's report to the plan that was made of it and is durable.",
            buckets=_REQUEST_SECONDS,
        )
        self._generations = self._counter(
            "generations", f"Published layouts by reason: {_values(ResizeReason)}.", ("reason",)
        )
        self._decisions = self._counter(
            "decisions", f"Decisions as told in Kubernetes events, by reason: {_values(Reason)}.", ("reason",)
        )
        self._requests = self._counter(
            "channel_requests",
            "Requests of workers by path of the channel and HTTP status code.",
            ("path", "code"),
        )
        kinds = ", ".join(kind.label for kind in Refusal)
        self._refusals = self._counter(
            "channel_refusals", f"Requests of workers that were not served, by reason: {kinds}.", ("reason",)
        )
        self._gauge("channel_connections", "Connections to the channel that are open.").set_function(connections)
        self._shut_out = self._counter(
            "channel_connections_refused",
            "Connections to the channel that were closed at once: too many were open, of their address or of all.",
        )
        self._api_requests = self._counter(
            "api_requests",
            "Requests to the API server by verb (get, list, watch, create, update, patch, delete), resource (with its"
            " subresource) and HTTP status code, NoAnswer without one.",
            ("verb", "resource", "code"),
        )
        self._api_seconds = self._histogram(
            "api_request_seconds",
            "Seconds of requests to the API server by verb, watches left out.",
            ("verb",),
            buckets=_REQUEST_SECONDS,
        )

    def decided(self, job: PipeTrainingJob, observed: Observed, plan: Plan, seconds: float) -> None:
        """See `Recorder`."""
        published, before = plan.status.plan, job.status
        if published is not None and plan.status.layout_generation != before.layout_generation:
            self._generations.labels(published.reason.value).inc()
        for event in plan.events:
            self._decisions.labels(event.reason.value).inc()
        key = JobKey(job.metadata.namespace, job.metadata.name)
        self._resizes.turned(key, before, plan.status)
        placed = {worker.id for worker in observed.workers if worker.scheduled or worker.phase != WorkerPhase.PENDING}
        wanted = set() if plan.status.finished else set(plan.status.worker_ids)
        self._pending[key] = len(wanted - placed)
        self._plan_seconds.observe(seconds)

    def turned(self, result: TurnResult, seconds: float) -> None:
        """See `Recorder`."""
        self._turns.labels(result.value).inc()
        self._turn_seconds.observe(seconds)

    def gone(self, key: JobKey) -> None:
        """See `Recorder`."""
        self._pending.pop(key, None)
        self._resizes.gone(key)

    def on_request(self, path: str, code: int, seconds: float) -> None:
        """Counts a request to the channel."""
        self._requests.labels(path, str(code)).inc()
        if path == Path.REPORT and code == 200:
            self._report_seconds.observe(seconds)

    def on_refusal(self, kind: Refusal) -> None:
        """Counts a request that was not served."""
        self._refusals.labels(kind.label).inc()

    def on_shut_out(self) -> None:
        """Counts a connection to the channel that was closed at once."""
        self._shut_out.inc()

    def asked(self, verb: str, resource: str, code: int | None, seconds: float) -> None:
        """Counts a request to the API server."""
        self._api_requests.labels(verb, resource, "NoAnswer" if code is None else str(code)).inc()
        if verb != _WATCH:
            self._api_seconds.labels(verb).observe(seconds)

    def _gauge(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", help_text, labels, registry=self.registry)

    def _counter(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"{PREFIX}_{name}", help_text, labels, registry=self.registry)

    def _histogram(
        self, name: str, help_text: str, labels: tuple[str, ...] = (), *, buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", help_text, labels, buckets=buckets, registry=self.registry)


class _WatchCollector(Collector):
    """When each watch was opened: the heartbeat of what the operator sees."""

    def __init__(self, watches: Callable[[], Mapping[str, float]]) -> None:
        self._watches = watches

    def collect(self) -> Iterator[Metric]:
        opened = GaugeMetricFamily(
            f"{PREFIX}_watch_opened_timestamp_seconds",
            "When the watch of a resource was last opened; it is opened anew every two minutes.",
            labels=("resource",),
        )
        for resource, time in sorted(self._watches().items()):
            opened.add_metric((resource,), time)
        yield opened


class _AvoidedCollector(Collector):
    """Nodes that workers are kept off; a series ends with the hour."""

    def __init__(self, avoided: Callable[[], Mapping[str, datetime]]) -> None:
        self._avoided = avoided

    def collect(self) -> Iterator[Metric]:
        until = GaugeMetricFamily(
            f"{PREFIX}_node_avoided_until_timestamp_seconds",
            "Until when no worker is sent to a node, because accelerators failed there more than once.",
            labels=("node",),
        )
        for node, time in sorted(self._avoided().items()):
            until.add_metric((node,), time.timestamp())
        yield until


def _values(kind: Iterable[Reason | ResizeReason | TurnResult]) -> str:
    return ", ".join(member.value for member in kind)
