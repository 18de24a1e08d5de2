"""The demo says what freezing saved, and admits when the accuracy is not the same."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import image

from pipetransformer_client.timeline.record import Evaluation, Freeze, Held, Record, Regroup, Span, Step, Visit
from tools.demo import picture
from tools.demo.__main__ import RECORDED, Demo
from tools.demo.compare import compare, figures, paired_error, sentence
from tools.demo.lines import at_step, decisions
from tools.demo.measured import Measured, load, save
from tools.demo.runs import variant
from tools.demo.shared import Cluster
from tools.demo.shared import sentence as shared_sentence

STEPS = 10
BASELINE = "the same job without freezing"


def record(layouts: Sequence[tuple[int, int, int]], seconds: float, frozen: Sequence[tuple[int, int]] = ()) -> Record:
    """A run of ten even steps and four layers.

    Args:
        layouts: first step, stages and pipelines of each layout.
        seconds: how long it trained.
        frozen: step and frozen layers of each freeze.
    """
    ends = [*(first * seconds / STEPS for first, _, _ in layouts[1:]), seconds]
    regroups = tuple(
        Regroup(
            time=first * seconds / STEPS, end=end, generation=number, reason="Start", stages=stages,
            pipelines=pipelines, frozen=0, first_step=first, pause_seconds=0.25, bytes_moved=0, schedule="",
            why_schedule="", idle_share=None, ahead_share=None,
        )
        for number, ((first, stages, pipelines), end) in enumerate(zip(layouts, ends, strict=True), start=1)
    )  # fmt: skip
    return Record(
        num_layers=4,
        seconds=seconds,
        outcome="complete",
        spans=(Span(0, seconds, 0, (Held(0, 1, 0), Held(2, 3, 1))),),
        regroups=regroups,
        freezes=tuple(Freeze(step * seconds / STEPS, step, layers) for step, layers in frozen),
        visits=(Visit(0, seconds / STEPS, 0, None, None),),
        steps=tuple(Step((number + 1) * seconds / STEPS, 1.0, 32.0) for number in range(STEPS)),
        evaluations=(Evaluation(seconds / 2, {"accuracy": 0.9}), Evaluation(seconds, {"accuracy": 0.95})),
    )


def runs(*, wrong: Sequence[int] = (1, 2), wrong_unfrozen: Sequence[int] = (1, 3)) -> tuple[Measured, Measured]:
    """An unfrozen run of 20 s, and one of 10 s that freezes at 2 s and packs at 4 s."""
    unfrozen = Measured(record([(0, 2, 1)], 20.0), tuple(wrong_unfrozen), 100, "a machine")
    freezing = record([(0, 2, 1), (4, 1, 2)], 10.0, [(2, 2)])
    return unfrozen, Measured(freezing, tuple(wrong), 100, "a machine")


def test_the_figures_are_those_of_the_two_records() -> None:
    compared = compare(*runs())
    assert compared.saved_gpu_seconds_share == pytest.approx(0.5)
    assert (compared.gpu_seconds_unfrozen, compared.gpu_seconds_freezing) == (40.0, 20.0)
    assert compared.first_freeze_share_of_time == pytest.approx(0.2)
    assert compared.share_of_steps_packed == pytest.approx(0.6)
    assert (compared.accuracy_difference, compared.same_accuracy) == (0.0, True)


def test_only_images_that_one_model_alone_gets_wrong_make_the_error() -> None:
    assert paired_error((1, 2, 3), (1, 2, 3), 100) == 0.0
    assert paired_error((1, 2, 3), (3, 4), 100) == pytest.approx(math.sqrt(3 - 1 / 100) / 100)


@pytest.mark.parametrize(
    ("wrong", "same"),
    [((1, 3, 4), True), ((1, 3, *range(10, 13)), True), ((1, 3, *range(10, 14)), False), ((), True)],
    ids=["one more", "three more", "four more", "fewer"],
)
def test_the_sentence_says_whether_the_accuracy_is_the_same(wrong: Sequence[int], same: bool) -> None:
    compared = compare(*runs(wrong=wrong))
    said = sentence(compared, BASELINE)
    assert compared.same_accuracy == same
    assert ("not at the same accuracy" in said) == (not same)


def test_the_sentence_names_savings_accuracies_errors_times_and_the_baseline() -> None:
    said = sentence(compare(*runs()), BASELINE)
    assert said == (
        "saved 50% of GPU-seconds (40 -> 20) at the same accuracy (98.0 ± 1.4 % -> 98.0 ± 1.4 % of 100 test images,"
        " difference +0.0 points, within 2 standard errors of 1.4), in 20 s -> 10 s, against the same job without"
        " freezing."
    )


def test_a_run_that_saves_nothing_is_said_to_save_nothing() -> None:
    unfrozen, freezing = runs()
    slower = replace(freezing, record=record([(0, 2, 1)], 25.0))
    compared = compare(unfrozen, slower)
    assert sentence(compared, BASELINE).startswith("saved nothing and took 25% more of GPU-seconds")
    assert compared.first_freeze_share_of_time is None


def test_runs_of_other_images_are_not_compared() -> None:
    unfrozen, freezing = runs()
    with pytest.raises(ValueError, match="100 and 50 images"):
        compare(unfrozen, replace(freezing, tested=50))


def test_the_summary_can_be_written_as_json() -> None:
    content = figures(compare(*runs()), seconds=30.0, seed=0, baseline=BASELINE)
    assert json.loads(json.dumps(content)) == content
    assert content["seconds"] == 30.0


def test_a_decision_is_a_freeze_or_a_change_of_the_layout() -> None:
    _, freezing = runs()
    assert [(one.step, one.words) for one in decisions(freezing.record)] == [
        (2, "2 of 4 frozen"),
        (4, "2x1 -> 1x2, pause 0.25 s"),
    ]


@pytest.mark.parametrize(
    ("step", "shown"), [(3, "2x1    3.0 s  -"), (5, "1x2    5.0 s  90.0%"), (10, "1x2   10.0 s  95.0%")]
)
def test_a_run_is_shown_as_it_was_at_a_step(step: int, shown: str) -> None:
    _, freezing = runs()
    assert at_step(freezing.record, step) == shown


def test_the_runs_differ_in_the_freeze_policy_alone() -> None:
    manifest = {"spec": {"freeze": {"policy": "PaperSchedule"}, "training": {"seed": 0, "epochs": 8}}}
    unfrozen, freezing = (variant(manifest, freezing=freezing, seed=3) for freezing in (False, True))
    assert freezing == {"spec": {"freeze": {"policy": "PaperSchedule"}, "training": {"seed": 3, "epochs": 8}}}
    assert unfrozen == {"spec": {"freeze": {"policy": "None"}, "training": {"seed": 3, "epochs": 8}}}
    assert variant(manifest, freezing=True, seed=None) == manifest


def test_a_recorded_baseline_is_read_as_it_was_written(tmp_path: Path) -> None:
    unfrozen, _ = runs()
    save(unfrozen, tmp_path / "baseline.json")
    assert load(tmp_path / "baseline.json") == unfrozen


def test_without_a_recorded_baseline_the_error_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make demo-baseline"):
        load(tmp_path / "baseline.json")


def test_the_recorded_baseline_is_of_all_test_images_and_froze_nothing() -> None:
    recorded = load(RECORDED)
    assert recorded.tested == 364
    assert recorded.machine
    assert {regroup.stages for regroup in recorded.record.regroups} == {4}
    assert recorded.record.freezes == ()


def test_a_comparison_with_the_recorded_baseline_names_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = load(RECORDED)
    demo = Demo({"spec": {"training": {}}}, tmp_path, 5)
    monkeypatch.setattr(demo, "freezing", lambda unfrozen: replace(recorded, machine="this machine"))
    demo.whole(recorded=True, began=time.monotonic())
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("saved 0% of GPU-seconds")
    assert said.endswith(f"against the same job without freezing, recorded earlier on {recorded.machine}.")
    assert json.loads((tmp_path / "summary.json").read_text())["seed"] == 5


def test_the_picture_is_drawn_wide_and_narrow(tmp_path: Path) -> None:
    drawn = picture.draw(*runs(), tmp_path)
    assert [path.name for path in drawn] == ["demo.png", "demo-narrow.png"]
    wide, narrow = (image.imread(path).shape for path in drawn)
    assert wide[1] > 2 * narrow[1]


async def test_a_job_waits_until_enough_gpus_are_free() -> None:
    cluster = Cluster(gpus=4)
    await cluster.take("first", 4)
    second = asyncio.create_task(cluster.take("second", 2))
    await asyncio.sleep(0)
    cluster.hold("first", 3)
    await asyncio.sleep(0)
    assert not second.done()
    cluster.hold("first", 2)
    await second
    assert [dict(held) for _, held in cluster.samples] == [
        {"first": 4},
        {"first": 3},
        {"first": 2},
        {"first": 2, "second": 2},
    ]


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ([(5.0, {"first": 2, "second": 2}), (9.0, {"second": 2}), (10.0, {})], "started while the first trained"),
        ([(5.0, {}), (5.0, {"second": 2}), (10.0, {})], "started only after the first had ended"),
    ],
    ids=["while it trains", "after it"],
)
def test_the_end_of_the_shared_demo_says_when_the_second_job_started(
    last: list[tuple[float, dict[str, int]]], said: str
) -> None:
    assert said in shared_sentence([(0.0, {"first": 4}), *last])
