"""Whole runs: the jobs, what they could take at best, what is read from a record, and the figures."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from benchmarks.worth.runs import FULL, SHORT
from benchmarks.worth.whole import fsdp, rivals
from benchmarks.worth.whole.case import LAYERS, STEPS, STEPS_PER_EPOCH, Case
from benchmarks.worth.whole.figures import BY_NAME, fallen, figures, is_comparable
from benchmarks.worth.whole.notes import Notes
from benchmarks.worth.whole.picture import draw
from benchmarks.worth.whole.product import busy_seconds
from benchmarks.worth.whole.took import Took, integral, read_took, worst_difference
from benchmarks.worth.whole.way import BOUNDARIES, DDP_FREEZE_CACHE, ELASTIC, OFFLOAD, RECUT_CACHE, STATIC, WAYS, Shape
from pipetransformer.partition.ideal import Course, Part, Segment
from pipetransformer_contract.api import trainer_spec
from pipetransformer_contract.api.manifest import Document, local_job, local_manifest
from pipetransformer_contract.layout import Layout
from tests.testkit.trainer.harness import Scripted, run_job
from tools.docs.benchmarks import FIGURES, rows

EIGHT = Case(8, 3)


def took(seconds: float, **more: Any) -> Took:
    return Took(seconds=seconds, gpu_seconds=8 * seconds, losses=[1.0, 0.5], **more)


def write_record(folder: Path, times: list[float]) -> None:
    """A run of one step a line, that began at second 100."""
    events = [{"kind": "Started", "time": 100.0}]
    steps = [
        {"step": number, "time": time, "loss": 1.0 / (number + 1), "frozenLayers": 0 if number < 2 else 4}
        for number, time in enumerate(times)
    ]
    generation = {"stages": 4, "pipelines": 2, "first_step": 0, "pause_seconds": 9.0}
    later = {"stages": 2, "pipelines": 2, "first_step": 2, "pause_seconds": 0.5}
    summary = {
        "steps": len(steps), "samples_lost": 0, "samples_repeated": 1, "generations": [generation, later, later]
    }  # fmt: skip
    for name, lines in (("events", events), ("steps", steps)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps(summary))


def test_a_record_gives_seconds_layouts_pauses_and_losses(tmp_path: Path) -> None:
    write_record(tmp_path, [101.0, 102.0, 104.5, 105.5])

    found = read_took(tmp_path, [(90.0, 8)])

    assert (found.seconds, found.gpu_seconds) == (5.5, 8 * 5.5)
    assert found.layout_names == "4x2, 2x2"
    assert found.pauses == [0.5, 0.5], "the start is none"
    assert found.losses == [1.0, 0.5, 1 / 3, 0.25]
    assert found.step_seconds == {"0": 1.0, "4": 1.75}
    assert (found.samples_lost, found.samples_repeated) == (0, 1)


def test_a_worker_counts_until_it_is_gone(tmp_path: Path) -> None:
    write_record(tmp_path, [101.0, 102.0, 104.0, 110.0])

    found = read_took(tmp_path, [(80.0, 0), (90.0, 8), (103.0, 8), (104.0, 6), (106.0, 4), (111.0, 0)])

    assert found.held == [(0.0, 8), (4.0, 6), (6.0, 4)]
    assert found.gpu_seconds == 8 * 4 + 6 * 2 + 4 * 4


def test_a_record_that_lacks_a_step_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path, [101.0, 102.0])
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    (tmp_path / "steps.jsonl").write_text(lines[0] + "\n")

    with pytest.raises(ValueError, match="does not hold each step once"):
        read_took(tmp_path, [(90.0, 8)])


def test_what_is_held_after_the_end_costs_nothing() -> None:
    assert integral([(0.0, 8), (2.0, 4), (9.0, 2)], seconds=5.0) == 8 * 2 + 4 * 3


def test_losses_are_compared_with_those_of_the_first_run() -> None:
    assert worst_difference([[1.0, 2.0]]) == 0
    assert worst_difference([[1.0, 2.0], [1.0, 2.0], [1.0, 2.2]]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="zip"):
        worst_difference([[1.0, 2.0], [1.0]])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_way_is_a_job_that_the_product_takes(way: Any, tmp_path: Path) -> None:
    job = EIGHT.job(way, tmp_path)
    spec = trainer_spec(job.spec)

    assert spec.training.steps == STEPS
    assert job.spec.elastic_policy.workers == 8
    assert spec.cache.policy.value == ("Auto" if way.cache else "Never")
    container = job.spec.pod_template.trainer().model_extra or {}
    assert bool(container["env"]) is not way.fits, "memory is bounded unless the model fits"


def test_a_way_that_keeps_its_layout_can_take_no_other(tmp_path: Path) -> None:
    policy = EIGHT.job(STATIC, tmp_path).spec.elastic_policy

    assert (policy.min_workers, policy.max_workers, policy.max_pipelines) == (8, 8, 2)


@pytest.mark.parametrize(
    ("case", "layout"), [(Case(4, 3), (4, 1)), (EIGHT, (4, 2)), (Case(16, 3), (4, 4)), (Case(16, 2), (8, 2))]
)
def test_the_best_static_layout_is_that_of_the_design(case: Case, layout: tuple[int, int]) -> None:
    assert case.static() == Layout(*layout)


def test_a_device_has_memory_for_three_layers_that_train() -> None:
    model = EIGHT.forecast(STATIC, EIGHT.device_bytes).job.layouts.step_model(None)

    assert 3 < EIGHT.device_bytes / model.trained_bytes[1] < 4


@pytest.mark.timeout(300)  # it searches all layouts of five ways
def test_what_is_elastic_could_take_less_at_best() -> None:
    ways = (STATIC, RECUT_CACHE, ELASTIC, OFFLOAD, DDP_FREEZE_CACHE)
    static, recut, elastic, offload, lone = (EIGHT.ideal(way) for way in ways)

    assert static and recut and elastic and offload and lone
    assert static.seconds > recut.seconds > elastic.seconds > offload.seconds > lone.seconds
    assert static.layouts == recut.layouts == [Layout(4, 2)]
    assert elastic.layouts[-1] == Layout(2, 4)
    assert offload.layouts[-1] == Layout(1, 8), "the frozen layers take no memory"
    assert lone.layouts == [Layout(1, 8)]


def test_an_ideal_grows_with_the_declared_times() -> None:
    plain, dilated = (case.ideal(STATIC) for case in (EIGHT, replace(EIGHT, dilate=4.0)))

    assert plain and dilated
    assert dilated.seconds == pytest.approx(4 * plain.seconds)
    assert replace(EIGHT, dilate=4.0).name == "n8_dilated_4"


def test_a_layout_that_is_not_cut_again_has_no_ideal() -> None:
    (as_cut,) = [way for way in WAYS if way.shape is Shape.AS_CUT]

    assert EIGHT.ideal(as_cut) is None


MEASURED: Mapping[str, list[Took]] = {
    "static": [took(60.0), took(66.0), took(63.0)],
    "freeze_recut_cache": [took(40.0), took(41.0), took(42.0)],
    "elastic": [took(30.0), took(33.0), took(28.0)],
}


@pytest.fixture
def half_a_second_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways could take half a second a step at best, which needs no search."""
    course = Course([Part(Segment(0, STEPS, 0, 0, 0), Layout(4, 2), 0.5, 8)])
    monkeypatch.setattr(Case, "ideal", lambda case, way: course)


@pytest.mark.usefixtures("half_a_second_a_step")
def test_figures_are_medians_and_ratios_of_one_round() -> None:
    found = figures(EIGHT, MEASURED)

    assert found["static"]["seconds"] == 63.0
    assert found["static"]["gpu_seconds"] == 8 * 63.0
    assert found["static"]["ideal_seconds"] == 60.0
    assert found["static"]["efficiency"] == 60.0 / 63.0
    assert found["speedup_over_best_static"] == 2.0
    assert found["elastic"]["speedup_over_best_static"] == 2.0
    assert found["speedup_over_freeze_only_recut"] == pytest.approx(40 / 30)
    assert (found["samples_lost"], found["samples_repeated"], found["loss_difference_worst"]) == (0, 0, 0)


@pytest.mark.usefixtures("half_a_second_a_step")
def test_only_runs_that_freeze_alike_must_have_the_same_losses() -> None:
    other = {**MEASURED, "ddp_freeze_cache": [replace(took(10.0), losses=[1.0, 0.6])], "ddp": [took(20.0)]}

    assert figures(EIGHT, other)["loss_difference_worst"] == pytest.approx(0.2)
    same = {**MEASURED, "ddp": [took(20.0)], "top_half": [replace(took(10.0), losses=[3.0, 2.0])]}
    assert figures(EIGHT, same)["loss_difference_worst"] == 0


@pytest.mark.usefixtures("half_a_second_a_step")
def test_offloaded_layers_change_no_loss_and_count_as_the_best_elastic_run() -> None:
    found = figures(EIGHT, {**MEASURED, "offload": [took(20.0), took(20.5), took(21.0)]})

    assert found["offload"]["losses_equal"] is True
    assert found["offload"]["speedup_over_best_static"] == 3.0
    assert found["speedup_over_freeze_only_recut"] == 2.0


@pytest.mark.usefixtures("half_a_second_a_step")
def test_a_run_by_auto_is_compared_with_the_static_one_by_auto() -> None:
    auto = {"static_auto": [took(40.0), took(44.0)], "offload_auto": [replace(took(20.0), commit="c" * 40), took(20.0)]}
    found = figures(EIGHT, {**MEASURED, **auto})

    assert found["offload_auto"]["speedup_over_static_auto"] == pytest.approx(2.1)
    assert found["offload_auto"]["commits"] == ["", "c" * 10]
    assert found["speedup_over_best_static"] == 2.0, "other runs stay compared with the static one by 1F1B"


def test_a_lower_efficiency_is_told_on_as_many_cores_alone() -> None:
    def result(efficiency: float, cores: int = 2) -> dict[str, Any]:
        return {"machine": {"cores": cores}, "runs": {"n8": {"gpus": 8, "static": {"efficiency": efficiency}}}}

    assert list(fallen(result(0.86), result(0.9))) == []
    assert list(fallen(result(0.84), result(0.9))) == ["n8.static: efficiency 0.840, and 0.900 in the committed result"]
    assert list(fallen(result(0.5), result(0.9, cores=4))) == []
    assert list(fallen({"machine": {"cores": 2}, "runs": {}}, result(0.9))) == [], "it was not measured"
    assert list(fallen(result(0.5), {})) == [], "there is no earlier result"
    assert is_comparable(result(0.5), result(0.9)) and not is_comparable(result(0.5), {})


@pytest.mark.usefixtures("half_a_second_a_step")
def test_every_figure_with_an_aim_is_found() -> None:
    measured = {name: [took(20.0), took(21.0)] for name in BY_NAME}
    document = {
        "runs": {case.name: figures(case, {name: measured[name] for name in names}) for case, names in FULL.items()}
    }

    for figure in FIGURES["worth-runs"]:
        found = list(rows(figure, document))
        assert found and found[0][-1] != "**not measured**", figure.path


def test_the_short_form_measures_what_has_an_aim() -> None:
    assert {case.name: set(names) for case, names in SHORT.items()}.keys() == {"n8", "n4", "n16"}
    assert all(set(names) <= set(FULL[case]) for case, names in SHORT.items())


def test_processor_time_counts_neither_idleness_nor_waits_for_disks() -> None:
    ticks = os.sysconf("SC_CLK_TCK")

    assert busy_seconds(f"cpu  {4 * ticks} {ticks} {2 * ticks} 99999 888 {ticks} {ticks} 777 0 0\ncpu0 1") == 9.0


def test_notes_go_on_where_an_earlier_command_ended(tmp_path: Path) -> None:
    file = tmp_path / "kept" / "notes.jsonl"
    first = took(3.0, held=[(0.0, 8)], layouts=[(0, 4, 2)])
    Notes(file).add("n8", "static", first)

    again = Notes(file)

    assert again.ways("n8") == {"static": [first]}
    assert (again.count("n8", "static"), again.count("n8", "elastic"), again.count("n4", "static")) == (1, 0, 0)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    run = took(30.0, held=[(0.0, 8), (10.0, 4)], layouts=[(0, 4, 2)])
    draw(EIGHT, {"static": run, "elastic": run}, {"static": "one", "elastic": "other"}, tmp_path / "runs.png")

    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_plain_torch_has_the_losses_of_the_job_on_one_worker(tmp_path: Path) -> None:
    """Two ranks freeze four layers in the second epoch, which the cache advances to seven in the third."""
    steps = 3 * STEPS_PER_EPOCH
    manifest = Case(2, 3, dilate=1e-9).manifest(DDP_FREEZE_CACHE, Layout(1, 2), None)
    spec = trainer_spec(local_job(local_manifest(Document("job", manifest)), tmp_path).spec)
    moves = DDP_FREEZE_CACHE.freezing.moves(LAYERS, STEPS_PER_EPOCH)
    shorter = spec.model_copy(update={"training": spec.training.model_copy(update={"steps": steps})})
    ours = run_job(shorter, [Scripted(1, 1, [0])], tmp_path)

    theirs = rivals.train(spec, 2, moves, steps)

    assert worst_difference([[line["loss"] for line in ours.steps], theirs.losses]) <= 1e-9
    assert theirs.losses[-1] < theirs.losses[0]


@pytest.mark.parametrize(
    ("segment", "rate", "seconds"),
    [
        # 16 samples: 12.05 ms a layer's forward, 36.15 ms a whole layer, 0.85 ms each end.
        (Segment(0, 1, 0, 0, 0), 1e12, 12 * 0.03615 + 3 * 0.00085 + 2 * 0.00085),
        (Segment(0, 1, 11, 11, 11), 1e12, 2 * 0.01205 + 3 * 0.00085),
        (Segment(0, 1, 11, 10, 10), 1e12, 3 * 0.01205 + 3 * 0.00085),
        (Segment(0, 1, 11, 10, 10), 1e3, 4 * 8 * fsdp.LAYER_BYTES * 7 / 8 / 1e3),
        (Segment(0, 1, 0, 0, 0), 1e3, 36 * 8 * fsdp.LAYER_BYTES * 7 / 8 / 1e3),
    ],
)
def test_fsdp_takes_its_work_or_its_messages_at_best(segment: Segment, rate: float, seconds: float) -> None:
    assert fsdp.step_at_best(segment, 8, rate) == pytest.approx(seconds)


def test_a_rate_between_two_measured_ones_takes_as_long_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """At twice the rate FSDP2 takes half the time, and ours lies in the middle on logarithmic axes."""
    monkeypatch.setattr(fsdp, "measure", lambda _, __, rate: fsdp.Line(rate, 4e9 / rate, 2e9 / rate))
    ours = 4e9 / fsdp.RATES[0] / 2**0.5
    found = fsdp.figures(EIGHT, ours, ours)

    assert found["link_gbps_where_equal"] == pytest.approx(fsdp.stated_gbps(fsdp.RATES[0] * 2**0.5))
    assert fsdp.figures(EIGHT, ours, 1e9)["link_gbps_where_equal"] is None, "no measured rate is as slow"
    messages = STEPS * 36 * 8 * fsdp.LAYER_BYTES * 7 / 8
    at_best = found["unfrozen"]["link_gbps_where_equal_at_best"]
    assert at_best == pytest.approx(fsdp.stated_gbps(messages / ours), rel=1e-5)
    assert fsdp.figures(EIGHT, ours, 1.0)["frozen_cache"]["link_gbps_where_equal_at_best"] is None, "work takes longer"
    for figure in FIGURES["worth-fsdp"]:
        assert list(rows(figure, {"runs": {"fsdp": found}})), figure.path


def test_layers_freeze_as_the_papers_schedule_with_a_third() -> None:
    shares = [LAYERS * (1 - Fraction(2, 3) ** decision) for decision in range(1, len(BOUNDARIES) + 1)]

    assert [math.ceil(share) for share in shares] == list(BOUNDARIES)


def test_offload_is_asked_for_where_the_product_has_it(tmp_path: Path) -> None:
    asked = EIGHT.manifest(BY_NAME["offload"], Layout(4, 2), None)["spec"]["cache"]  # type: ignore[arg-type]

    assert asked.get("offloadFrozen") == "Auto"
