"""The metrics of one operator: its loops, its channel and its requests to the API server."""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from importlib.metadata import version
from typing import Protocol

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

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.status import ConditionType, Reason
from pipetransformer_contract.messages import ResizeReason
from pipetransformer_contract.wire import ChannelPath
from pipetransformer_operator.channel.listener import ChannelListener
from pipetransformer_operator.channel.refusal import Refusal
from pipetransformer_operator.channel.tls.certificate import Validity
from pipetransformer_operator.clocks import Clock, utc_now
from pipetransformer_operator.controller.ports import JobKey, LoopMetrics, TurnResult
from pipetransformer_operator.plan import FailureCause, Observed, Plan, WorkerPhase

from .idle import idle_gpus
from .jobs import JobCollector, ManagedJobs, Seen
from .names import PREFIX
from .resizes import Resizes, Returns
from .starts import Starts

_QUICK_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_REQUEST_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15)
_LAG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_WATCH = "watch"
#: A series of node failures ends this long after its last one, because an autoscaler makes new nodes endlessly. The
#: alert looks back six hours.
_FAILURES_SHOWN = timedelta(days=1)
#: A trainer may give any reason for a failure; the others count as TrainingFailed.
_REASON = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
#: How a job may end. These series begin at 0, because Prometheus sees no increase in a series that begins at 1.
_ENDS: Mapping[ConditionType, Iterable[Reason]] = {
    ConditionType.COMPLETE: [Reason.TRAINING_SUCCEEDED],
    ConditionType.FAILED: [
        Reason.INVALID_SPEC,
        Reason.USER_ERROR,
        Reason.OUT_OF_MEMORY,
        Reason.TRAINING_FAILED,
        Reason.BACKOFF_LIMIT_EXCEEDED,
        Reason.DEADLINE_EXCEEDED,
    ],
}


class OperatorState(ManagedJobs, Protocol):
    """The state of the operator that metrics show at each scrape."""

    @property
    def leads(self) -> bool:
        """Whether this operator holds the lease and may write."""
        ...

    @property
    def watches(self) -> Mapping[str, float]:
        """When the watch of each resource was opened, seconds since the epoch; the oldest of several."""
        ...

    @property
    def connections(self) -> int:
        """Open connections of workers to the channel."""
        ...

    @property
    def avoided_nodes(self) -> Mapping[str, datetime]:
        """Names of nodes on which accelerators failed, and until when they get no worker."""
        ...

    @property
    def certificates(self) -> Mapping[str, Validity]:
        """Validity of the certificates that the channel uses now, by what they are."""
        ...

    @property
    def kueue_answers(self) -> bool | None:
        """Whether Kueue answers; None if this operator does not use it."""
        ...


class Metrics(LoopMetrics, ChannelListener):
    """All metrics of one operator, in a registry of their own. `show` adds those that are read at each scrape.

    Args:
        clock: the present time, with its time zone.
    """

    def __init__(self, clock: Clock = utc_now) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series
        self.registry = CollectorRegistry()
        self._clock = clock
        self._seen: dict[tuple[str, str], Seen] = {}
        self._failed: dict[tuple[str, str], datetime] = {}
        self._resizes = Resizes(self.registry)
        self._returns = Returns()
        self._starts = Starts(self.registry)
        ProcessCollector(registry=self.registry)
        build = self._gauge("build_info", "1, with the version of this operator.", ("version",))
        build.labels(version("pipetransformer-operator")).set(1)
        self._add_loops()
        self._add_channel()
        self._add_requests()

    def show(self, state: OperatorState) -> None:
        """Adds the metrics that are read from `state` at each scrape. Call it once."""
        self.registry.register(JobCollector(state, self._seen, self._clock))
        for collector in (_WatchCollector, _AvoidedCollector, _CertificateCollector, _KueueCollector):
            self.registry.register(collector(state))
        self._gauge(
            "leader",
            "1 while this operator holds the lease and may write; 0 if another holds it or the API server is away.",
        ).set_function(lambda: float(state.leads))
        self._gauge("channel_connections", "Open connections to the channel.").set_function(lambda: state.connections)

    def _add_loops(self) -> None:
        self._turns = self._counter(
            "reconciles", f"Turns of jobs' loops by result: {', '.join(TurnResult)}.", ("result",)
        )
        self._turn_seconds = self._histogram(
            "reconcile_seconds", "Seconds of a turn of a job's loop: observe, plan, write.", buckets=_REQUEST_SECONDS
        )
        self._plan_seconds = self._histogram(
            "plan_seconds", "Seconds for the plan alone in a turn, without any I/O.", buckets=_QUICK_SECONDS
        )
        self._report_seconds = self._histogram(
            "report_seconds",
            "Seconds from a leader's report until the plan that follows from it is durable.",
            buckets=_REQUEST_SECONDS,
        )
        self._generations = self._counter(
            "generations", f"Published layouts by reason: {', '.join(ResizeReason)}.", ("reason",)
        )
        for why in ResizeReason:
            self._generations.labels(why.value)
        self._decisions = self._counter(
            "decisions", f"Kubernetes events for decisions, by reason: {', '.join(Reason)}.", ("reason",)
        )
        self._finished = self._counter(
            "jobs_finished",
            "Jobs that ended, by state (Complete, Failed) and the reason of that condition.",
            ("state", "reason"),
        )
        for kind, reasons in _ENDS.items():
            for reason in reasons:
                self._finished.labels(kind.value, reason.value)
        self._node_failures = self._counter(
            "node_failures",
            f"Failures of workers by the node that they ran on and cause: {', '.join(FailureCause)}.",
            ("node", "cause"),
        )
        self._lag = self._histogram(
            "event_loop_lag_seconds",
            "Seconds that the operator's event loop was late, sampled four times a second.",
            buckets=_LAG_SECONDS,
        )

    def _add_channel(self) -> None:
        self._requests = self._counter(
            "channel_requests",
            "Requests from workers by path of the channel and HTTP status code.",
            ("path", "code"),
        )
        kinds = ", ".join(kind.label for kind in Refusal)
        self._refusals = self._counter(
            "channel_refusals", f"Requests from workers that were refused, by reason: {kinds}.", ("reason",)
        )
        self._shut_out = self._counter(
            "channel_connections_refused",
            "Connections to the channel that were closed at once, because too many were open from their address or"
            " in total.",
        )

    def _add_requests(self) -> None:
        self._api_requests = self._counter(
            "api_requests",
            "Requests to the API server by verb (get, list, watch, create, update, patch, delete), resource (with its"
            " subresource) and HTTP status code, or NoAnswer.",
            ("verb", "resource", "code"),
        )
        self._api_seconds = self._histogram(
            "api_request_seconds",
            "Seconds of requests to the API server by verb, without watches.",
            ("verb",),
            buckets=_REQUEST_SECONDS,
        )

    def on_decided(self, job: PipeTrainingJob, observed: Observed, plan: Plan, seconds: float) -> None:
        """See `LoopMetrics`."""
        published, before = plan.status.generation, job.status
        if published is not None and plan.status.layout_generation != before.layout_generation:
            self._generations.labels(published.reason.value).inc()
        for event in plan.events:
            self._decisions.labels(event.reason.value).inc()
        key = JobKey.of(job)
        self._resizes.on_turned(key, before, plan.status)
        self._returns.on_turned(key, before, plan.status)
        self._starts.on_turned(key, before, plan.status, observed.report, self._clock())
        placed = {worker.id for worker in observed.workers if worker.scheduled or worker.phase != WorkerPhase.PENDING}
        wanted = set() if plan.status.finished else set(plan.status.worker_ids)
        idle = idle_gpus(observed, plan.status)
        self._seen[key] = Seen(len(wanted - placed), idle, self._returns.count(key))
        self._count_failures(plan)
        if plan.status.finished and not before.finished:
            self._count_end(plan.status)
        self._plan_seconds.observe(seconds)

    def _count_failures(self, plan: Plan) -> None:
        now = self._clock()
        for failure in plan.failures:
            series = failure.node, failure.cause.value
            self._node_failures.labels(*series).inc()
            self._failed.pop(series, None)  # the newest comes last
            self._failed[series] = now
        while self._failed and now > next(iter(self._failed.values())) + _FAILURES_SHOWN:
            series = next(iter(self._failed))
            del self._failed[series]
            self._node_failures.remove(*series)

    def on_turned(self, result: TurnResult, seconds: float) -> None:
        """See `LoopMetrics`."""
        self._turns.labels(result.value).inc()
        self._turn_seconds.observe(seconds)

    def on_gone(self, key: JobKey) -> None:
        """See `LoopMetrics`."""
        self._seen.pop(key, None)
        self._resizes.on_gone(key)
        self._returns.on_gone(key)
        self._starts.on_gone(key)

    def on_lag(self, seconds: float) -> None:
        """See `LagListener`."""
        self._lag.observe(seconds)

    def _count_end(self, status: JobStatus) -> None:
        kind = ConditionType.FAILED if status.is_true(ConditionType.FAILED) else ConditionType.COMPLETE
        reason = status.reason(kind)
        known = reason if _REASON.fullmatch(reason) else Reason.TRAINING_FAILED.value
        self._finished.labels(kind.value, known).inc()

    def on_request(self, path: str, code: int, seconds: float) -> None:
        """See `ChannelListener`."""
        self._requests.labels(path, str(code)).inc()
        if path == ChannelPath.REPORT and code == 200:
            self._report_seconds.observe(seconds)

    def on_refusal(self, kind: Refusal) -> None:
        """See `ChannelListener`."""
        self._refusals.labels(kind.label).inc()

    def on_shut_out(self) -> None:
        """See `ChannelListener`."""
        self._shut_out.inc()

    def on_api_request(self, verb: str, resource: str, code: int | None, seconds: float) -> None:
        """See `RequestListener`."""
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
    """When each watch was opened, which shows that the operator still sees changes."""

    def __init__(self, state: OperatorState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        opened = GaugeMetricFamily(
            f"{PREFIX}_watch_opened_timestamp_seconds",
            "When the watch of a resource was last opened; the operator reopens it every two minutes.",
            labels=("resource",),
        )
        for resource, time in sorted(self._state.watches.items()):
            opened.add_metric((resource,), time)
        yield opened


class _AvoidedCollector(Collector):
    """Nodes that get no workers. A series ends when the time is over."""

    def __init__(self, state: OperatorState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        until = GaugeMetricFamily(
            f"{PREFIX}_node_avoided_until_timestamp_seconds",
            "Until when a node gets no worker, because accelerators failed there more than once.",
            labels=("node",),
        )
        for node, time in sorted(self._state.avoided_nodes.items()):
            until.add_metric((node,), time.timestamp())
        yield until


class _CertificateCollector(Collector):
    """When the channel's certificates begin and end, so that an alert sees one that is not renewed."""

    def __init__(self, state: OperatorState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        kinds = "Server (the channel's own), Authority (the newest that workers trust)"
        begins = GaugeMetricFamily(
            f"{PREFIX}_certificate_start_timestamp_seconds",
            f"When the certificate in use begins to be valid, by certificate: {kinds}.",
            labels=("certificate",),
        )
        ends = GaugeMetricFamily(
            f"{PREFIX}_certificate_expiry_timestamp_seconds",
            f"When the certificate in use expires, by certificate: {kinds}.",
            labels=("certificate",),
        )
        for name, validity in sorted(self._state.certificates.items()):
            begins.add_metric((name,), validity.start.timestamp())
            ends.add_metric((name,), validity.end.timestamp())
        yield from (begins, ends)


class _KueueCollector(Collector):
    """Collects whether Kueue answers. Without Kueue the metric has no value."""

    def __init__(self, state: OperatorState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        answers = GaugeMetricFamily(
            f"{PREFIX}_kueue_answers", "1 while Kueue answers the operator, otherwise 0; none without Kueue."
        )
        if self._state.kueue_answers is not None:
            answers.add_metric((), self._state.kueue_answers)
        yield answers
