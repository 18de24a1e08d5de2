"""What the leader tells the operator of its layout."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.callbacks.callback import Callback, Teller
from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.partition import Cut, StepModel, assumed_costs
from pipetransformer.record import lines
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.training.leader import Leader
from pipetransformer.training.leader_events import (
    BoundaryMoved,
    Evaluated,
    FirstStepTaken,
    FreezeKept,
    GenerationBegun,
    WaitingForLevel,
)
from pipetransformer.training.leader_reports import Offered
from pipetransformer.training.vote import StepSums, Vote
from pipetransformer_contract.messages import Generation, HeldOut, Member, Report, ResizeReason, Upcoming
from tests.testkit.trainer.harness import Reports
from tests.testkit.trainer.levels import level_job
from tests.testkit.trainer.numerics import ADAMW, make_spec


def layout_of(job: Job, reason: ResizeReason) -> StageLayout:
    """One worker with all units."""
    member = Member(name="w0", uid="w0", address="127.0.0.1:1")
    generation = Generation(
        job_uid="job", layout_generation=1, stages=1, pipelines=1, members=[member], leader="w0", nonce="n",
        reason=reason,
    )  # fmt: skip
    return StageLayout(generation, 0, [(0, 0)], Cut([range(job.num_layers + 2)], job.micro_batch_size))


def take_steps(leader: Leader, control: Control, count: int) -> None:
    for _ in range(count):
        control.step += 1
        control.last_step = {
            "step": control.step - 1, "epoch": 0, "samples": 100, "loss": 1.0, "gradient_norm": 1.0,
            "learning_rate": 0.1, "generation": 1, "frozen_layers": control.boundary,
        }  # fmt: skip
        leader.on_round(control, Vote(), seconds=1.0, idle_share=0.25, ahead_share=0.0, staleness=[()])


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (ResizeReason.START, 1.0),
        (ResizeReason.PACK, 3600.0),
        (ResizeReason.CLAIM, 3600.0),
        (ResizeReason.FAILURE, 0.75),
        (ResizeReason.DRAIN, 0.75),
        (ResizeReason.UNDO, 0.75),
    ],
)
def test_offers_say_what_a_planned_change_costs(reason: ResizeReason, expected: float, tmp_path: Path) -> None:
    job, reports = load_job(make_spec(ADAMW)), Reports()
    leader = Leader(job, reports, Teller([]), tmp_path, layout_of(job, reason), Offered())
    control = Control(step=5)

    phases = {"groups": 0.5, "assemble": 60.0, "first step": 0.25}  # state that nobody had was read from storage
    leader.tell(FirstStepTaken(control, pause_seconds=3600.0, phases=phases, transfers=[]))
    leader.tell(BoundaryMoved(control))

    assert {offer.pause_seconds for offer in reports.sent[-1].offers} == {expected}

    leader.tell(FirstStepTaken(control, pause_seconds=3600.0, phases=phases, transfers=[(0, 1, 8)]))
    leader.tell(BoundaryMoved(control))
    moved = expected + 60.0 if expected == 0.75 else expected
    assert {offer.pause_seconds for offer in reports.sent[-1].offers} == {moved}, "what was read came from a peer"


def test_the_step_of_the_start_is_told_on_the_scale_of_the_measured_steps(tmp_path: Path) -> None:
    one_worker = {"pipeline": {"stages": 1, "microBatchSize": 22}, "numShards": 1, "workers": 1}
    job, reports = load_job(make_spec(ADAMW, **one_worker)), Reports()
    leader = Leader(job, reports, Teller([]), tmp_path, layout_of(job, ResizeReason.START), Offered())
    control = Control(costs=assumed_costs(job.num_layers).model_dump())
    take_steps(leader, control, 5)
    assert reports.sent[-1].starting_step_seconds == pytest.approx(1.0), "this worker trains in the first layout"

    control.boundary = 2
    take_steps(leader, control, 5)
    report = reports.sent[-1]
    assert report.step_seconds == pytest.approx(1.0)
    # By assumed costs, forwards and backwards of all units take 18.5 turns, and 13.4 with two layers frozen.
    assert report.starting_step_seconds == pytest.approx(18.5 / 13.4)


@pytest.mark.parametrize(("first_layout", "expected"), [([1, 1], 1.0), ([1, 2], 0.5), ([], 0.5)])
def test_the_step_of_the_start_is_that_of_the_layout_in_which_the_job_began(
    first_layout: list[int], expected: float, tmp_path: Path
) -> None:
    two_workers = {"pipeline": {"stages": 1, "microBatchSize": 25}, "numShards": 2, "workers": 2}
    job, reports = load_job(make_spec(ADAMW, **two_workers)), Reports()
    leader = Leader(job, reports, Teller([]), tmp_path, layout_of(job, ResizeReason.START), Offered())
    control = Control(costs=assumed_costs(job.num_layers).model_dump(), first_layout=first_layout)
    take_steps(leader, control, 5)
    assert reports.sent[-1].starting_step_seconds == pytest.approx(expected), "the present layout has one worker"


def test_the_time_left_is_told_once_steps_of_the_layout_are_measured(tmp_path: Path) -> None:
    job, reports = load_job(make_spec(ADAMW)), Reports()
    told: list[Any] = []

    class Log(Callback):
        def on_step(self, line: Mapping[str, Any]) -> None:
            told.append((line["seconds_left"], line["total_steps"], line["num_layers"]))

    teller = Teller([Log()])
    leader = Leader(job, reports, teller, tmp_path, layout_of(job, ResizeReason.START), Offered())
    control = Control()
    leader.tell(GenerationBegun(control, None))
    take_steps(leader, control, 5)
    left = float(job.total_steps - 5)
    teller.catch_up()
    assert told == [(None, job.total_steps, job.num_layers)] * 4 + [(left, job.total_steps, job.num_layers)]
    assert [report.seconds_left for report in reports.sent] == [None, left]
    assert [report.samples_per_second for report in reports.sent] == [None, job.order.global_batch]

    control.boundary = 2
    take_steps(leader, control, 5)
    assert reports.sent[-1].seconds_left == left - 5, "the boundary's steps are measured anew"
    leader.on_finished(Control(step=job.total_steps))
    assert reports.sent[-1].seconds_left == 0


def test_the_words_of_a_programs_schedule_may_be_long(tmp_path: Path) -> None:
    job, reports = load_job(make_spec(ADAMW)), Reports()
    layout = layout_of(job, ResizeReason.START)
    layout = replace(layout, cut=replace(layout.cut, why_schedule="a" * 5000, why_in_place="b" * 5000))
    leader = Leader(job, reports, Teller([]), tmp_path, layout, Offered())
    leader.tell(GenerationBegun(Control(why_thawed="c" * 5000), None))
    report = reports.sent[-1]
    words = (report.why_schedule, report.why_frozen_forward, report.why_thawed)
    assert [text[:9] for text in words] == ["a" * 9, "b" * 9, "c" * 9]


def test_a_job_that_waits_for_its_level_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It votes ten times a second, and nothing changes meanwhile."""
    monkeypatch.setattr("pipetransformer.training.leader_reports._REPORT_SECONDS", 0.0)
    leader, reports = lead_visit(level_job("own-vit", tmp_path), 1, Offered(), tmp_path)

    for _ in range(3):
        leader.tell(WaitingForLevel(Control(step=6, visit=1)))

    assert [report.upcoming for report in reports.sent] == [Upcoming(step=6, level=0, waits=True)]


@pytest.mark.parametrize(("visit", "left"), [(0, None), (1, None), (2, 33.0)])
def test_the_time_left_is_told_in_the_last_visit_alone(visit: int, left: float | None, tmp_path: Path) -> None:
    """Steps of another level take another time."""
    job = level_job("own-vit", tmp_path, training={"steps": 40})
    leader, reports = lead_visit(job, visit, Offered(), tmp_path)

    take_steps(leader, Control(step=2, visit=visit), 5)

    assert reports.sent[-1].seconds_left == left


def test_the_newest_evaluation_is_told_by_the_metric_that_counts(tmp_path: Path) -> None:
    job, reports = load_job(make_spec(ADAMW)), Reports()
    leader = Leader(job, reports, Teller([]), tmp_path, layout_of(job, ResizeReason.START), Offered())
    control = Control(step=3)
    leader.tell(GenerationBegun(control, None))
    assert reports.sent[-1].held_out is None
    control.note_evaluation({"loss": 0.5, "accuracy": 0.75}, better=True)
    leader.tell(BoundaryMoved(control))
    assert reports.sent[-1].held_out == HeldOut(metric="accuracy", value=0.75, step=3)
    control.note_evaluation({"loss": 0.5, "accuracy": math.nan}, better=False)
    leader.tell(BoundaryMoved(control))
    assert reports.sent[-1].held_out is None


@pytest.mark.parametrize("boundary", [0, 2], ids=["as-offered", "another-boundary"])
def test_a_new_generation_waits_for_few_predictions_or_none(
    boundary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made between two steps, for as many pipelines as the data allow."""
    job = load_job(make_spec(ADAMW, pipeline={"stages": 4, "packing": "Measured"}, numShards=64))
    costs, reports, offered, cuts = assumed_costs(job.num_layers).model_dump(), Reports(), Offered(), list[Cut]()
    cut = StepModel.cut

    def counted(*asked: Any) -> Cut:
        cuts.append(cut(*asked))
        return cuts[-1]

    monkeypatch.setattr(StepModel, "cut", counted)

    def lengths(report: Report) -> list[int]:
        return [offer.stages for offer in report.offers]

    old = Leader(job, reports, Teller([]), tmp_path, layout_of(job, ResizeReason.START), offered)
    control = Control(costs=costs)
    old.tell(GenerationBegun(control, None))
    assert len(cuts) == 4, "without times the widths of a length are all the same"
    take_steps(old, control, 5)
    assert len(cuts) > 200 and all(offer.step_seconds for offer in reports.sent[-1].offers)

    cuts.clear()
    control.boundary = boundary
    new = Leader(job, reports, Teller([]), tmp_path, layout_of(job, ResizeReason.CLAIM), offered)
    new.tell(GenerationBegun(control, None))
    assert len(cuts) == (4 if boundary else 0)
    assert new.idle_share is not None
    assert lengths(reports.sent[-1]) == [4, 3, 2, 1]
    assert not any(offer.step_seconds for offer in reports.sent[-1].offers), "those were of the old layout's steps"
    take_steps(new, control, 5)
    assert all(offer.step_seconds for offer in reports.sent[-1].offers)


def test_a_leader_that_goes_back_says_how_many_steps_are_trained_again(tmp_path: Path) -> None:
    job, reports = load_job(make_spec(ADAMW)), Reports()
    first = Leader(job, reports, Teller([]), tmp_path, layout_of(job, ResizeReason.START), Offered())
    control = Control()
    first.tell(GenerationBegun(control, None))
    take_steps(first, control, 9)
    assert {report.redone_steps for report in reports.sent} == {0}

    back = Control(step=6)
    second = Leader(job, reports, Teller([]), tmp_path, layout_of(job, ResizeReason.FAILURE), Offered())
    second.tell(GenerationBegun(back, None))
    assert reports.sent[-1].redone_steps == 3
    take_steps(second, back, 5)
    assert reports.sent[-1].redone_steps == 3


def test_layouts_wait_while_layers_are_on_trial(tmp_path: Path) -> None:
    """Otherwise GPUs would be given back that a thaw needs again."""
    job, reports = load_job(make_spec(ADAMW)), Reports()
    leader = Leader(job, reports, Teller([]), tmp_path, layout_of(job, ResizeReason.START), Offered())
    control = Control(step=5)
    leader.tell(GenerationBegun(control, None))
    before = reports.sent[-1].offers

    control.boundary, control.boundary_step, control.on_trial = 4, 5, 4
    leader.tell(BoundaryMoved(control))
    assert (reports.sent[-1].boundary, reports.sent[-1].offers) == (4, before)

    take_steps(leader, control, 5)
    assert (reports.sent[-1].step_seconds or 0.0) > 1.1, "as if the layers trained"
    control.step = 5

    control.on_trial = 0
    leader.tell(FreezeKept(control, "layers 0-3 stay frozen: training loss 0.1 % below its trend"))
    assert reports.sent[-1].boundary == 4 and reports.sent[-1].offers != before
    assert list(lines.read(tmp_path / "events.jsonl"))[-1].items() >= {
        "kind": "FreezeKept", "step": 5, "frozenLayers": 4,
        "why": "layers 0-3 stay frozen: training loss 0.1 % below its trend",
    }.items()  # fmt: skip


def test_offers_are_made_anew_as_soon_as_costs_are_measured_anew(tmp_path: Path) -> None:
    job, reports = load_job(make_spec(ADAMW, pipeline={"stages": 2, "packing": "Measured"})), Reports()
    leader = Leader(job, reports, Teller([]), tmp_path, layout_of(job, ResizeReason.START), Offered())
    control = Control(costs=assumed_costs(job.num_layers).model_dump())
    leader.tell(GenerationBegun(control, None))
    take_steps(leader, control, 6)
    sent = len(reports.sent)

    control.costs = assumed_costs(job.num_layers).model_copy(update={"worker_bytes": 1 << 30}).model_dump()
    take_steps(leader, control, 1)
    take_steps(leader, control, 1)

    assert [report.step for report in reports.sent[sent:]] == [7]


@pytest.mark.parametrize(
    ("control", "level", "holds"),
    [
        (Control(boundary=3, on_trial=1, cached_layers=1), 1, True),
        (Control(boundary=3, on_trial=1, cached_layers=2), 1, False),
        (Control(boundary=3, cached_layers=1), 1, False),
        (Control(boundary=3, on_trial=1, cached_layers=1), 0, False),
    ],
)
def test_offers_hold_for_one_level_boundary_and_cache(control: Control, level: int, holds: bool) -> None:
    assert Offered(boundary=2, cached_layers=1, level=1).holds_for(control, level) is holds


def test_a_round_of_two_steps_is_told_as_two_that_share_its_time(tmp_path: Path) -> None:
    job, told = load_job(make_spec(ADAMW)), list[Any]()

    class Log(Callback):
        def on_step(self, line: Mapping[str, Any]) -> None:
            told.append((line["step"], line["samples_per_second"], line["staleness"], line["staleness_largest"]))

    reports, teller = Reports(), Teller([Log()])
    leader = Leader(job, reports, teller, tmp_path, layout_of(job, ResizeReason.START), Offered())
    line = {"epoch": 0, "samples": 100, "loss": 1.0, "gradient_norm": 1.0, "learning_rate": 0.1, "generation": 1}
    control = Control(step=0)
    for _ in range(3):
        control.step += 2
        *control.earlier_steps, control.last_step = (
            {"step": control.step - before, "frozen_layers": 0, **line} for before in (2, 1)
        )
        vote = Vote(earlier=[StepSums()])
        leader.on_round(control, vote, seconds=4.0, idle_share=0.0, ahead_share=0.0, staleness=[(0, 1), (1, 3)])
    teller.catch_up()

    assert told == [(step, 50.0, *((2.0, 3) if step % 2 else (0.5, 1))) for step in range(6)]
    assert reports.sent[-1].samples_per_second == job.order.global_batch / 2.0


def test_an_end_in_many_words_is_cut_for_the_report(tmp_path: Path) -> None:
    job, reports = load_job(make_spec(ADAMW)), Reports()
    leader = Leader(job, reports, Teller([]), tmp_path, layout_of(job, ResizeReason.START), Offered())
    leader.on_failed(Control(), "ModelFailed", "because " * 400)
    assert len(reports.sent[-1].message) == 1024


def test_an_end_is_told_although_its_words_name_a_file_of_any_bytes(tmp_path: Path) -> None:
    job, reports = load_job(make_spec(ADAMW)), Reports()
    leader = Leader(job, reports, Teller([]), tmp_path, layout_of(job, ResizeReason.START), Offered())
    leader.on_failed(Control(), "ModelFailed", "cannot read " + os.fsdecode(b"caf\xe9.jpg"))
    assert reports.sent[-1].message == "cannot read caf?.jpg"


def test_a_metric_that_is_no_number_has_no_value_in_the_record(tmp_path: Path) -> None:
    job = load_job(make_spec(ADAMW))
    leader = Leader(job, Reports(), Teller([]), tmp_path, layout_of(job, ResizeReason.START), Offered())
    control = Control(step=3)
    control.note_evaluation({"loss": math.inf, "accuracy": 0.5}, better=False)
    leader.tell(Evaluated(control, better=False))
    (event,) = lines.read(tmp_path / "events.jsonl")
    assert event["metrics"] == {"loss": None, "accuracy": 0.5}


def test_a_larger_model_is_announced_two_minutes_ahead(tmp_path: Path) -> None:
    levels = {"descentSteps": 2, "ascentSteps": 200}
    job, control = level_job("own-vit", tmp_path, levels=levels, training={"steps": 400}), Control(step=2, visit=1)
    leader, reports = lead_visit(job, 1, Offered(), tmp_path)
    take_steps(leader, control, 5)
    assert reports.sent[-1].upcoming is None
    control.step = 82
    leader.tell(BoundaryMoved(control))
    assert reports.sent[-1].upcoming is None, "120 seconds"
    control.step = 83
    leader.tell(BoundaryMoved(control))
    assert reports.sent[-1].upcoming == Upcoming(step=202, level=0)


def lead_visit(job: Job, visit: int, offered: Offered, folder: Path) -> tuple[Leader, Reports]:
    """A new leader of a visit that a larger model follows, and its reports."""
    level, reports = job.at(visit), Reports()
    layout = layout_of(level, ResizeReason.CLAIM)
    return Leader(level, reports, Teller([]), folder, layout, offered, grows_into=job.grows_into(visit)), reports


def test_a_new_generation_still_announces_the_larger_model(tmp_path: Path) -> None:
    """Otherwise it offered the small one's layouts first, and the workers that were just claimed would go."""
    levels = {"levels": 3, "descentSteps": 2, "ascentSteps": 10}
    job, offered = level_job("own-vit", tmp_path, levels=levels, training={"steps": 40}), Offered()
    control = Control(step=4, visit=2)
    before, reports = lead_visit(job, 2, offered, tmp_path)
    before.tell(GenerationBegun(control, None))
    assert reports.sent[-1].upcoming is None, "no step was measured yet"
    take_steps(before, control, 5)
    assert reports.sent[-1].upcoming == Upcoming(step=14, level=1)

    after, reports = lead_visit(job, 2, offered, tmp_path)
    after.tell(GenerationBegun(control, None))

    assert reports.sent[-1].upcoming == Upcoming(step=14, level=1)
    control.visit = 3
    following, reports = lead_visit(job, 3, offered, tmp_path)
    following.tell(GenerationBegun(control, None))
    assert reports.sent[-1].upcoming is None, "this model was not announced"
