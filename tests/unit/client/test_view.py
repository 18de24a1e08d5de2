"""The drawing of `run` and `watch`: pipelines by stages, with frozen layers shaded."""

import re
from datetime import UTC, datetime
from io import StringIO

import pytest
from rich.console import Console

from pipetransformer_client.cli.view import LiveView, PlainView, draw_layout, progress_line
from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.status import LastReport
from pipetransformer_contract.messages import Generation, HeldOut, Member, Outcome, ResizeReason
from tests.testkit.client.fake_kube import finished
from tests.testkit.operator.builders import make_job


@pytest.fixture
def job() -> PipeTrainingJob:
    """Two pipelines of two stages with 8 of 12 layers frozen."""
    generation = Generation(
        job_uid="job",
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
        stage_frozen_layers=[8, 0],
        bytes_budget=0,
        loss=0.25,
        samples_per_second=412.0,
        total_steps=400,
        seconds_left=200.0,
        held_out=HeldOut(metric="accuracy", value=0.9412, step=30),
        time=datetime.now(UTC),
    )
    return make_job().job().model_copy(update={"status": JobStatus(generation=generation, last_report=report)})


def test_a_terminal_shows_every_pipeline_with_its_frozen_layers(job: PipeTrainingJob) -> None:
    console = Console(record=True, width=100, force_terminal=True, file=StringIO())
    with LiveView(console) as view:
        view.show_status(job.metadata.name, job.status)
        view.show_event("GenerationPublished", "Generation 2", warning=False)
    text = console.export_text()
    assert "pipeline 1" in text and "stage 1" in text
    assert "▒▒▒▒▒▒▒▒█ " in text and " ███" in text
    assert "frozen 8/12" in text and "Generation 2" in text


def test_a_terminal_shows_the_newest_events_and_no_layers_of_an_older_layout(job: PipeTrainingJob) -> None:
    console = Console(record=True, width=100, force_terminal=True, file=StringIO())
    assert job.status.generation is not None
    newer = job.status.generation.model_copy(update={"layout_generation": 3})
    with LiveView(console) as view:
        view.show_status(job.metadata.name, job.status.model_copy(update={"generation": newer}))
        for number in range(8):
            view.show_event(f"Event{number}", "so it is", warning=False)
    last = console.export_text().rpartition("generation 3")[2]
    assert re.findall(r"Event(\d)", last) == list("234567")
    assert "stage 1" in last and "█" not in last


def test_a_line_of_a_pipe_is_as_long_as_it_is() -> None:
    console = Console(record=True, width=20, file=StringIO())
    PlainView(console).show_event("WorkerLost", "digits-w0 on node [a] ended", warning=True)
    assert console.export_text() == "WorkerLost: digits-w0 on node [a] ended\n"


def test_progress_names_step_total_time_left_loss_metric_and_layout(job: PipeTrainingJob) -> None:
    assert progress_line(job.status) == (
        "step 40/400 (10%)  ETA 3m20s  loss 0.2500  held-out accuracy 0.9412  layout 2 x 2  frozen 8/12  412 samples/s"
    )


def test_progress_says_nothing_of_what_is_not_known(job: PipeTrainingJob) -> None:
    """The remaining time is unknown until steps of the layout are measured. A newer layout has no steps yet."""
    assert job.status.last_report is not None and job.status.generation is not None
    report = job.status.last_report.model_copy(update={"seconds_left": None, "held_out": None, "loss": None})
    generation = job.status.generation.model_copy(update={"layout_generation": 3})
    status = job.status.model_copy(update={"last_report": report, "generation": generation})
    assert progress_line(status) == "step 40/400 (10%)  frozen 8/12  412 samples/s"
    assert progress_line(JobStatus()) == ""
    almost = job.status.model_copy(update={"last_report": report.model_copy(update={"step": 399})})
    assert progress_line(almost).startswith("step 399/400 (99%)"), "100% is the end"
    ended = job.status.last_report.model_copy(update={"outcome": Outcome.FAILED})
    assert "ETA" not in progress_line(job.status.model_copy(update={"last_report": ended}))


def test_a_pipe_gets_a_line_a_minute_and_one_for_each_layout_and_freeze(job: PipeTrainingJob) -> None:
    console, now = Console(record=True, width=200, file=StringIO()), [1000.0]
    view = PlainView(console, lambda: now[0])
    assert job.status.last_report is not None

    def steps_shown(step: int, **changed: object) -> list[str]:
        assert job.status.last_report is not None
        report = job.status.last_report.model_copy(update={"step": step, **changed})
        view.show_status(job.metadata.name, job.status.model_copy(update={"last_report": report}))
        return re.findall(r"step (\d+)/", console.export_text(clear=False))

    assert steps_shown(40) == ["40"]
    now[0] += 59
    assert steps_shown(45) == ["40"]
    now[0] += 1
    assert steps_shown(50) == ["40", "50"]
    assert steps_shown(55, boundary=9) == ["40", "50", "55"]
    assert steps_shown(60, boundary=9, layout_generation=3) == ["40", "50", "55", "60"]
    assert steps_shown(61, boundary=9, layout_generation=3) == ["40", "50", "55", "60"]
    ended = {"boundary": 9, "layout_generation": 3, "outcome": Outcome.SUCCEEDED}
    assert steps_shown(400, **ended) == ["40", "50", "55", "60", "400"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (JobStatus(), "no layout"),
        (JobStatus(worker_ids=[3]), "1 worker is starting"),
        (JobStatus(worker_ids=[0, 1]), "2 workers are starting"),
        (JobStatus.model_validate({"workerIds": [0, 1], "conditions": [finished("Failed")]}), "no layout"),
    ],
    ids=["pending or suspended", "one", "two", "failed at its start"],
)
def test_a_job_without_a_layout_says_how_many_workers_start(status: JobStatus, words: str) -> None:
    assert str(draw_layout(status)) == words
