"""Metrics: series of a job end with the job, and each change of layout counts once, by its result."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    Gpus,
    LayoutSize,
    QuotaRequest,
    Reason,
    Resize,
    ResizePhase,
)
from pipetransformer_contract.messages import DurableCheckpoint, Generation, Member, Report, ResizeReason
from pipetransformer_operator.channel.tls.certificate import Validity
from pipetransformer_operator.clocks import Clock, utc_now
from pipetransformer_operator.controller.ports import JobKey, TurnResult
from pipetransformer_operator.kube.client.verbs import describe, namespace_of
from pipetransformer_operator.metrics import Metrics
from pipetransformer_operator.metrics.resizes import Direction, Result, direction_of, result_of
from pipetransformer_operator.metrics.starts import Starts
from pipetransformer_operator.plan import (
    EventType,
    FailureCause,
    NodeFailure,
    Observed,
    Plan,
    PlanEvent,
    Worker,
    WorkerPhase,
)
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.shown_state import ShownState

NOW = datetime(2026, 1, 1, tzinfo=UTC)
JOB = {"namespace": "default", "job_name": "digits"}


def published(number: int, *, confirmed: int = 0, reason: ResizeReason = ResizeReason.RELEASE) -> JobStatus:
    generation = Generation(
        job_uid="job",
        layout_generation=number,
        stages=2,
        pipelines=1,
        members=[Member(name=f"digits-w{i}", uid=f"u{i}", address="a:1") for i in range(2)],
        leader="digits-w0",
        nonce="n",
        reason=reason,
        confirmed_generation=confirmed,
    )
    return JobStatus(
        generation=generation, layout_generation=number, gpus=Gpus(held=2, released=2), worker_ids=[0, 1, 2]
    )


def resizing(status: JobStatus, phase: ResizePhase, reason: ResizeReason = ResizeReason.CLAIM) -> JobStatus:
    size = LayoutSize(stages=2, pipelines=1), LayoutSize(stages=2, pipelines=2)
    resize = Resize(from_=size[0], to=size[1], phase=phase, reason=reason, start_time=NOW)
    return status.model_copy(update={"resize": resize})


def job_with(status: JobStatus) -> PipeTrainingJob:
    return make_job().job().model_copy(update={"status": status})


def observed(*workers: Worker) -> Observed:
    return Observed(uid="u", name="digits", namespace="default", status=JobStatus(), workers=workers)


def metrics_of(jobs: list[PipeTrainingJob], clock: Clock = utc_now, **state: Any) -> Metrics:
    metrics = Metrics(clock)
    metrics.show(ShownState(jobs, **state))
    return metrics


def figure(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"pipetransformer_{name}", labels)


def test_series_of_a_job_vanish_with_it() -> None:
    jobs = [job_with(published(2))]
    metrics = metrics_of(jobs)
    metrics.on_decided(jobs[0], observed(), Plan(status=jobs[0].status), 0.001)
    assert figure(metrics, "job_gpus_released_total", **JOB) == 2
    assert figure(metrics, "job_layout_generation", **JOB) == 2
    assert figure(metrics, "job_state", **JOB, state="Pending") == 1
    assert figure(metrics, "job_frozen_layers", **JOB) is None  # nothing was reported yet
    jobs.clear()
    assert "digits" not in generate_latest(metrics.registry).decode()


def test_metrics_forget_jobs_that_are_gone_without_a_scrape() -> None:
    metrics = metrics_of([])
    job = job_with(published(2))
    metrics.on_decided(job, observed(), Plan(status=resizing(job.status, ResizePhase.PREPARE)), 0.001)
    assert metrics._seen and metrics._resizes._entered
    metrics.on_gone(JobKey(job.metadata.namespace, job.metadata.name))
    assert not metrics._seen and not metrics._resizes._entered


def test_a_job_in_a_queue_shows_the_quota_it_has_and_waits_for() -> None:
    held = QuotaRequest(name="digits-q0", queue="team-a", workers=4, returned=1, admitted=True)
    claim = QuotaRequest(name="digits-q1", queue="team-a", workers=2)
    jobs = [job_with(published(1).model_copy(update={"quota_requests": [held, claim]}))]
    metrics = metrics_of(jobs)
    assert figure(metrics, "job_quota_granted", **JOB) == 3
    assert figure(metrics, "job_quota_waiting", **JOB) == 2
    jobs[:] = [job_with(published(1))]
    assert figure(metrics, "job_quota_waiting", **JOB) is None


def test_workers_without_a_node_are_pending() -> None:
    job = job_with(published(1))
    metrics = metrics_of([job])
    placed = Worker(id=0, name="digits-w0", uid="u0", scheduled=True)
    running = Worker(id=1, name="digits-w1", uid="u1", phase=WorkerPhase.RUNNING)
    waiting = Worker(id=2, name="digits-w2", uid="u2")
    metrics.on_decided(job, observed(placed, running, waiting), Plan(status=job.status), 0.001)
    assert figure(metrics, "job_gpus_pending", **JOB) == 1
    metrics.on_decided(job, observed(placed), Plan(status=job.status), 0.001)
    assert figure(metrics, "job_gpus_pending", **JOB) == 2


def test_gpus_that_are_held_without_training_show_by_reason() -> None:
    job = job_with(published(1))  # not confirmed
    metrics = metrics_of([job])
    members = [Worker(id=i, name=f"digits-w{i}", uid=f"u{i}", scheduled=True) for i in range(2)]
    metrics.on_decided(job, observed(*members), Plan(status=job.status), 0.001)
    assert figure(metrics, "job_gpus_idle", **JOB, reason="Regrouping") == 2
    assert figure(metrics, "job_gpus_idle", **JOB, reason="Stalled") is None


def test_failures_count_by_node_and_cause() -> None:
    metrics = metrics_of([])
    lost = NodeFailure("node-a", FailureCause.LOST)
    failures = (lost, lost, NodeFailure("node-b", FailureCause.KILLED))
    metrics.on_decided(make_job().job(), observed(), Plan(status=JobStatus(), failures=failures), 0.001)
    assert figure(metrics, "node_failures_total", node="node-a", cause="Lost") == 2
    assert figure(metrics, "node_failures_total", node="node-b", cause="Killed") == 1


def test_a_day_after_the_last_failure_of_a_node_its_series_ends() -> None:
    times = [NOW]
    metrics = metrics_of([], clock=lambda: times[0])

    def shown(*nodes: str) -> list[float | None]:
        failures = tuple(NodeFailure(node, FailureCause.LOST) for node in nodes)
        metrics.on_decided(make_job().job(), observed(), Plan(status=JobStatus(), failures=failures), 0.001)
        return [figure(metrics, "node_failures_total", node=node, cause="Lost") for node in ("gone", "bad")]

    assert shown("bad", "gone") == [1, 1]
    times[0] += timedelta(hours=20)
    assert shown("bad") == [1, 2]
    times[0] += timedelta(hours=5)
    assert shown() == [None, 2]


@pytest.mark.parametrize(
    ("kind", "reason", "counted"),
    [
        (ConditionType.COMPLETE, "TrainingSucceeded", ("Complete", "TrainingSucceeded")),
        (ConditionType.FAILED, "StorageFailed", ("Failed", "StorageFailed")),
        (ConditionType.FAILED, "no word" * 100, ("Failed", "TrainingFailed")),
    ],
)
def test_a_job_that_ends_counts_once_by_its_cause(kind: ConditionType, reason: str, counted: tuple[str, str]) -> None:
    metrics, before = metrics_of([]), published(1)
    ended = Condition(type=kind, status=ConditionStatus.TRUE, reason=reason, last_transition_time=NOW)
    after = before.model_copy(update={"conditions": [ended]})
    metrics.on_decided(job_with(before), observed(), Plan(status=after), 0.001)
    metrics.on_decided(job_with(after), observed(), Plan(status=after), 0.001)
    assert figure(metrics, "jobs_finished_total", state=counted[0], reason=counted[1]) == 1


def test_the_checkpoint_shows_its_age_and_what_it_cost() -> None:
    durable = DurableCheckpoint(step=7, boundary=0, min_stages=1, pause_seconds=0.5, write_seconds=30)
    status = published(1).model_copy(update={"checkpoint": durable, "checkpoint_time": NOW, "redone_steps": 12})
    metrics = metrics_of([job_with(status)])
    assert figure(metrics, "job_checkpoint_timestamp_seconds", **JOB) == NOW.timestamp()
    assert figure(metrics, "job_checkpoint_pause_seconds", **JOB) == 0.5
    assert figure(metrics, "job_checkpoint_write_seconds", **JOB) == 30
    assert figure(metrics, "job_redone_steps_total", **JOB) == 12


def test_certificates_and_kueue_show_what_the_operator_uses_now() -> None:
    validity = Validity(NOW, NOW + timedelta(days=30))
    metrics = metrics_of([], certificates={"Server": validity}, kueue_answers=False)
    expiry = figure(metrics, "certificate_expiry_timestamp_seconds", certificate="Server")
    assert expiry == (NOW + timedelta(days=30)).timestamp()
    assert figure(metrics, "certificate_start_timestamp_seconds", certificate="Server") == NOW.timestamp()
    assert figure(metrics, "kueue_answers") == 0
    assert figure(metrics_of([]), "kueue_answers") is None, "without Kueue there is nothing to answer"


def report(generation: int, step: int) -> Report:
    return Report(
        job_uid="u", layout_generation=generation, step=step, boundary=0, num_layers=12, bytes_budget=1, checkpoint=None
    )


def test_a_start_is_timed_from_asking_for_workers_to_the_first_step_that_they_make() -> None:
    registry = CollectorRegistry()
    starts, key = Starts(registry), JobKey("default", "digits")
    asked = JobStatus(start_time=NOW)

    def at(seconds: float, before: JobStatus, after: JobStatus, heard: Report | None = None) -> float:
        starts.on_turned(key, before, after, heard, NOW + timedelta(seconds=seconds))
        return registry.get_sample_value("pipetransformer_first_step_seconds_sum") or 0.0

    at(0, JobStatus(), asked)
    assert at(40, asked, published(1)) == 0
    assert at(50, published(1), published(1), report(1, 300)) == 0, "it has resumed from a checkpoint"
    assert at(55, published(1), published(1), report(1, 300)) == 0, "the same report, sent again"
    assert at(60, published(1), published(1), report(1, 301)) == 60
    assert at(70, published(1), published(1), report(1, 302)) == 60
    lost = published(1).model_copy(update={"generation": None, "start_time": NOW})
    at(1000, published(1), lost, report(1, 400))
    at(1010, lost, published(2), report(1, 400))
    assert at(1020, published(2), published(2), report(2, 350)) == 60, "no step since the start"
    assert at(1030, published(2), published(2), report(2, 351)) == 60 + 30, "it counts from the loss of all workers"


def laid_out(number: int, stages: int, reason: ResizeReason) -> JobStatus:
    status = published(number, reason=reason)
    assert status.generation is not None
    return status.model_copy(update={"generation": status.generation.model_copy(update={"stages": stages})})


FLAPS = [
    ([("PACK", 1), ("DEEPEN", 2), ("PACK", 1)], 2),
    ([("PACK", 1), ("RELEASE", 4), ("CLAIM", 3)], 0),
    ([("PACK", 1), ("FAILURE", 4), ("CLAIM", 1)], 0),
    ([("PACK", 1), ("SPEC", 2)], 0),
    ([("PACK", 1), ("UNDO", 2)], 0),
]


@pytest.mark.parametrize(("changes", "returns"), FLAPS)
def test_a_layout_that_a_job_chose_to_leave_and_returns_to_counts(changes: list[tuple[str, int]], returns: int) -> None:
    before = laid_out(1, 2, ResizeReason.START)
    metrics = metrics_of([job_with(before)])
    for number, (reason, stages) in enumerate(changes, 2):
        after = laid_out(number, stages, ResizeReason[reason])
        metrics.on_decided(job_with(before), observed(), Plan(status=after), 0.001)
        metrics.on_decided(job_with(after), observed(), Plan(status=after), 0.001)
        before = after
    assert figure(metrics, "job_layout_returns_total", **JOB) == returns


def test_lag_of_the_event_loop_is_counted() -> None:
    metrics = metrics_of([])
    metrics.on_lag(0.3)
    assert figure(metrics, "event_loop_lag_seconds_bucket", le="0.25") == 0
    assert figure(metrics, "event_loop_lag_seconds_bucket", le="0.5") == 1


def test_saved_gpu_seconds_grow_between_two_writes_of_the_status() -> None:
    times = [NOW + timedelta(seconds=100)]
    saved = {"gpus": Gpus(held=4, saved=2), "gpu_seconds_saved": 50.0, "gpu_seconds_time": NOW}
    job = job_with(published(1).model_copy(update=saved))
    metrics = metrics_of([job], clock=lambda: times[0])
    assert figure(metrics, "job_saved_gpu_seconds_total", **JOB) == 50 + 2 * 100
    times[0] += timedelta(seconds=10)
    assert figure(metrics, "job_saved_gpu_seconds_total", **JOB) == 50 + 2 * 110


def test_each_decision_counts_by_its_reason() -> None:
    metrics = metrics_of([])
    told = PlanEvent(EventType.WARNING, Reason.UNSCHEDULABLE, "Resize cancelled")
    metrics.on_decided(make_job().job(), observed(), Plan(status=JobStatus(), events=(told, told)), 0.001)
    assert figure(metrics, "decisions_total", reason="Unschedulable") == 2


def test_a_published_layout_counts_once_by_its_reason() -> None:
    metrics = metrics_of([])
    metrics.on_decided(job_with(published(1)), observed(), Plan(status=published(2)), 0.001)
    metrics.on_decided(job_with(published(2)), observed(), Plan(status=published(2)), 0.001)
    assert figure(metrics, "generations_total", reason="Release") == 1


PREPARING = resizing(published(1, confirmed=1), ResizePhase.PREPARE)
COMMITTING = resizing(published(2, confirmed=1), ResizePhase.COMMIT)
RESULTS = [
    (PREPARING, PREPARING, None),
    (PREPARING, resizing(published(2, confirmed=1, reason=ResizeReason.CLAIM), ResizePhase.COMMIT), None),
    (PREPARING, published(1, confirmed=1), Result.CANCELLED),
    (PREPARING, resizing(published(2, reason=ResizeReason.FAILURE), ResizePhase.COMMIT), Result.SUPERSEDED),
    (COMMITTING, COMMITTING, None),
    (COMMITTING, resizing(published(2, confirmed=2), ResizePhase.CLEAN), Result.COMMITTED),
    (COMMITTING, published(2, confirmed=2), Result.COMMITTED),
    (COMMITTING, published(3, confirmed=2), Result.COMMITTED),  # and the next one was published in the same turn
    (COMMITTING, published(3, confirmed=1, reason=ResizeReason.UNDO), Result.UNDONE),
    (COMMITTING, published(3, confirmed=1, reason=ResizeReason.FAILURE), Result.SUPERSEDED),
    (COMMITTING, JobStatus(layout_generation=2), Result.SUPERSEDED),  # no worker is left
    (resizing(published(2, confirmed=2), ResizePhase.CLEAN), published(2, confirmed=2), None),
    (published(2, confirmed=2), published(3, confirmed=2), None),
]


@pytest.mark.parametrize(("before", "after", "result"), RESULTS)
def test_a_change_of_layout_ends_once(before: JobStatus, after: JobStatus, result: Result | None) -> None:
    assert result_of(before, after) is result


@pytest.mark.parametrize(
    ("old", "direction"), [(None, "START"), ((1, 2), "GROW"), ((4, 1), "KEEP"), ((4, 2), "SHRINK")]
)
def test_the_direction_is_told_by_workers(old: tuple[int, int] | None, direction: str) -> None:
    from_ = None if old is None else LayoutSize(stages=old[0], pipelines=old[1])
    to = LayoutSize(stages=2, pipelines=2)
    phase, reason = ResizePhase.COMMIT, ResizeReason.PACK
    assert direction_of(Resize(from_=from_, to=to, phase=phase, reason=reason, start_time=NOW)) is Direction[direction]


def test_phases_of_a_change_are_timed_from_where_they_began() -> None:
    metrics = metrics_of([])
    before = published(1, confirmed=1)
    for after in (PREPARING, PREPARING, COMMITTING, published(2, confirmed=2)):
        metrics.on_decided(job_with(before), observed(), Plan(status=after), 0.001)
        before = after
    assert figure(metrics, "resize_phase_seconds_count", phase="Prepare") == 1
    assert figure(metrics, "resize_phase_seconds_count", phase="Commit") == 1
    assert figure(metrics, "resizes_total", direction="Grow", result="Committed") == 1


def test_a_phase_that_began_before_the_operator_did_is_not_timed() -> None:
    metrics = metrics_of([])
    metrics.on_decided(job_with(PREPARING), observed(), Plan(status=PREPARING), 0.001)
    metrics.on_decided(job_with(PREPARING), observed(), Plan(status=published(1, confirmed=1)), 0.001)
    assert figure(metrics, "resize_phase_seconds_count", phase="Prepare") is None
    assert figure(metrics, "resizes_total", direction="Grow", result="Cancelled") == 1


def test_the_first_of_each_kind_is_an_increase_because_its_series_begins_at_zero() -> None:
    metrics = metrics_of([])
    kinds = {"generations_total": 10, "resizes_total": 16, "jobs_finished_total": 7}
    for name, number in kinds.items():
        values = [
            sample.value
            for family in metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"pipetransformer_{name}"
        ]
        assert values == [0] * number, name


def test_turns_and_requests_count_by_how_they_ended() -> None:
    metrics = metrics_of([], leads=False, watches={"pods": 1e9})
    metrics.on_turned(TurnResult.CONFLICT, 0.01)
    metrics.on_api_request("update", "pipetrainingjobs/status", 409, 0.01)
    metrics.on_api_request("create", "pods", None, 15.0)
    metrics.on_api_request("watch", "pods", 200, 0.01)
    metrics.on_request("/v1/report", 200, 0.02)
    metrics.on_request("/v1/report", 503, 10.0)
    assert figure(metrics, "reconciles_total", result="Conflict") == 1
    assert figure(metrics, "api_requests_total", verb="create", resource="pods", code="NoAnswer") == 1
    assert figure(metrics, "api_request_seconds_count", verb="watch") is None
    assert figure(metrics, "report_seconds_count") == 1
    assert figure(metrics, "leader") == 0
    assert figure(metrics, "watch_opened_timestamp_seconds", resource="pods") == 1e9


CRD = "/apis/training.pipetransformer.io/v1alpha1"
REQUESTS: list[tuple[str, str, dict[str, Any], tuple[str, str]]] = [
    ("GET", f"{CRD}/pipetrainingjobs", {"watch": True}, ("watch", "pipetrainingjobs")),
    ("GET", f"{CRD}/namespaces/a/pipetrainingjobs", {}, ("list", "pipetrainingjobs")),
    ("GET", f"{CRD}/namespaces/a/pipetrainingjobs/b", {}, ("get", "pipetrainingjobs")),
    ("GET", f"{CRD}/namespaces/a/pipetrainingjobs?labelSelector=x", {}, ("list", "pipetrainingjobs")),
    ("PUT", f"{CRD}/namespaces/a/pipetrainingjobs/b/status", {}, ("update", "pipetrainingjobs/status")),
    ("POST", "/api/v1/namespaces/a/pods", {}, ("create", "pods")),
    ("DELETE", "/api/v1/namespaces/a/pods/b", {}, ("delete", "pods")),
    ("GET", "/api/v1/namespaces/a", {}, ("get", "namespaces")),
    ("GET", CRD, {}, ("get", "discovery")),
]


@pytest.mark.parametrize(("method", "path", "options", "described"), REQUESTS)
def test_requests_are_named_as_kubernetes_does(
    method: str, path: str, options: dict[str, Any], described: tuple[str, str]
) -> None:
    assert describe(method, path, **options) == described
    assert namespace_of(path) == ("a" if "/namespaces/a/" in path else "")
