"""Metrics: per-job series live as long as the job, and each published layout counts once."""

from prometheus_client import generate_latest

from pipetransformer_contract.messages import Member, ResizeReason
from pipetransformer_operator.api import JobStatus, PipeTrainingJob
from pipetransformer_operator.api.status import Gpus, PublishedPlan, Reason
from pipetransformer_operator.metrics import Metrics
from pipetransformer_operator.plan import EventType, Plan, PlanEvent
from tests.builders import make_job


def published(number: int) -> JobStatus:
    plan = PublishedPlan(
        layout_generation=number,
        stages=2,
        pipelines=1,
        members=[Member(name=f"digits-w{i}", uid=f"u{i}", address="a:1") for i in range(2)],
        leader="digits-w0",
        nonce="n",
        reason=ResizeReason.RELEASE,
    )
    return JobStatus(plan=plan, layout_generation=number, gpus=Gpus(held=2, released=2))


def test_series_of_a_job_vanish_with_it() -> None:
    jobs: list[PipeTrainingJob] = [make_job().job().model_copy(update={"status": published(2)})]
    metrics = Metrics(lambda: jobs)
    text = generate_latest(metrics.registry).decode()
    assert 'pipetransformer_job_gpus_released{job="digits",namespace="default"} 2.0' in text
    assert 'pipetransformer_job_layout_generation{job="digits",namespace="default"} 2.0' in text
    jobs.clear()
    assert "digits" not in generate_latest(metrics.registry).decode()


def test_each_decision_counts_by_its_reason() -> None:
    metrics = Metrics(list)
    told = PlanEvent(EventType.WARNING, Reason.UNSCHEDULABLE, "Resize cancelled")
    metrics.decided(make_job().job(), Plan(status=JobStatus(), events=(told, told)))
    assert metrics.registry.get_sample_value("pipetransformer_decisions_total", {"reason": "Unschedulable"}) == 2


def test_a_published_layout_counts_once_by_its_reason() -> None:
    metrics = Metrics(list)
    before = make_job().job().model_copy(update={"status": published(1)})
    metrics.decided(before, Plan(status=published(2)))
    metrics.decided(before.model_copy(update={"status": published(2)}), Plan(status=published(2)))
    assert metrics.registry.get_sample_value("pipetransformer_resizes_total", {"reason": "Release"}) == 1
