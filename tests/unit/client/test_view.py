"""What `run` and `watch` draw: pipelines by stages with the frozen blocks shaded."""

from datetime import UTC, datetime
from io import StringIO

import pytest
from rich.console import Console

from pipetransformer_client.cli.view import LiveView, PlainView
from pipetransformer_contract.messages import Member, ResizeReason
from pipetransformer_operator.api import JobStatus, PipeTrainingJob
from pipetransformer_operator.api.status import LastReport, PublishedPlan
from tests.builders import make_job


@pytest.fixture
def job() -> PipeTrainingJob:
    """Two pipelines of two stages with 8 of 12 blocks frozen."""
    plan = PublishedPlan(
        layout_generation=2,
        stages=2,
        pipelines=2,
        members=[Member(name=f"digits-w{i}", uid=f"u{i}", address="a:1") for i in range(4)],
        leader="digits-w0",
        nonce="n",
        reason=ResizeReason.PACK,
    )
    report = LastReport(
        job_uid="j",
        layout_generation=2,
        step=40,
        epoch=1,
        boundary=8,
        num_layers=12,
        stage_layers=[9, 3],
        bytes_budget=0,
        loss=0.25,
        time=datetime.now(UTC),
    )
    return make_job().job().model_copy(update={"status": JobStatus(plan=plan, last_report=report)})


def test_a_terminal_shows_every_pipeline_with_its_frozen_blocks(job: PipeTrainingJob) -> None:
    console = Console(record=True, width=100, force_terminal=True, file=StringIO())
    with LiveView(console) as view:
        view.changed(job.metadata.name, job.status)
        view.told("GenerationPublished", "Generation 2", warning=False)
    text = console.export_text()
    assert "pipeline 1" in text and "stage 1" in text
    assert "▒▒▒▒▒▒▒▒█ " in text and " ███" in text
    assert "frozen 8/12" in text and "Generation 2" in text


def test_a_pipe_gets_one_line_a_report(job: PipeTrainingJob) -> None:
    console = Console(record=True, width=200, file=StringIO())
    with PlainView(console) as view:
        view.changed(job.metadata.name, job.status)
        view.changed(job.metadata.name, job.status)
    assert console.export_text().count("step 40") == 1
