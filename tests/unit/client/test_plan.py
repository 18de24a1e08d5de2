"""`plan` predicts the layouts that the operator will choose."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipetransformer.job.load import load_job
from pipetransformer.library.forecast import Forecast
from pipetransformer.partition import assumed_costs
from pipetransformer_client.phases import bounds_of
from pipetransformer_contract.api import trainer_spec
from pipetransformer_contract.layout import Layout
from tests.testkit.client.command_line import command
from tests.testkit.documented import documented
from tests.testkit.operator.builders import JobBuilder, make_job
from tools.devcluster.layout import REPOSITORY

DEMO = REPOSITORY / "examples" / "vit-digits.yaml"


def packing_job() -> JobBuilder:
    """Four stages of three layers. With 8 frozen layers two workers are enough, with 11 one."""
    points = [{"step": 100, "boundary": 8}, {"step": 200, "boundary": 11}]
    return make_job().stages(4).workers(4).set("freeze", {"policy": "Explicit", "boundaries": points})


def planned(
    job: JobBuilder | Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *words: str,
) -> dict[str, Any]:
    """The output of `plan -o json`."""
    file = job if isinstance(job, Path) else folder / "job.yaml"
    if isinstance(job, JobBuilder):
        file.write_text(yaml.safe_dump(job.manifest()))
    code = command(monkeypatch, "plan", str(file), "-o", "json", *words)
    out, err = capsys.readouterr()
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def levels_job() -> JobBuilder:
    """A job that trains half of its layers in steps 10 to 69."""
    levels = {"descentSteps": 10, "ascentSteps": 60, "depthFactor": 2, "widthFactor": 2}
    job = make_job().stages(4).workers(4).release().checkpoint().set("multiLevel", levels)
    return job.set("training", {"steps": 100}).set("freeze", {"policy": "None"})


def layouts(plan: dict[str, Any]) -> list[tuple[int, int]]:
    """(stages, pipelines) of each phase, without repetitions."""
    found = [(phase["stages"], phase["pipelines"]) for phase in plan["phases"]]
    return [layout for number, layout in enumerate(found) if number == 0 or layout != found[number - 1]]


def test_a_model_in_the_current_folder_is_planned_as_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "from tests.testkit.user_code.residual_model import make_data, make_model\n"
    (tmp_path / "of_this_folder.py").write_text(words)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    model = {"name": "of_this_folder:make_model", "numLayers": 12, "options": {"num_layers": 12}}
    job = packing_job().set("model", model).set("data", {"name": "of_this_folder:make_data"})
    assert layouts(planned(job, tmp_path, monkeypatch, capsys))[0] == (4, 1)


def test_the_demos_plan_is_what_its_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (typed,) = documented("pipetransformer plan examples/finetune-digits.yaml")
    plan = planned(REPOSITORY / typed.split()[-1], tmp_path, monkeypatch, capsys)
    assert layouts(plan) == [(4, 1), (2, 2), (1, 4)]
    # the first decision comes an interval after the 15 steps without freezing
    assert [(phase["firstStep"], phase["frozenLayers"]) for phase in plan["phases"]] == [
        (0, 0),
        (55, 4),
        (95, 7),
        (135, 9),
        (175, 10),
        (215, 11),
        (295, 12),
    ]
    assert 0 < plan["saved"]["time"] < 1
    assert plan["saved"]["time"] == pytest.approx(plan["saved"]["gpuTime"])


def test_each_visit_of_a_level_is_a_phase_with_the_layout_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(levels_job(), tmp_path, monkeypatch, capsys)

    assert [(phase["firstStep"], phase["level"]) for phase in plan["phases"]] == [(0, 0), (10, 1), (70, 0)]
    assert layouts(plan) == [(4, 1), (1, 1), (4, 1)]
    assert plan["phases"][1]["stageLayers"] == [6], "half of the layers"
    assert plan["saved"]["gpuTime"] > 0.5


def test_a_plan_counts_its_regroups_and_names_fields_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    for job, said in (
        (packing_job().set("training.epochs", 20), "the first layout without freezing: "),
        (packing_job().set("training.epochs", 20), "Not counted: the pauses of 2 regroups."),
        (levels_job(), "Compared with the first layout without freezing or levels: "),
        (make_job().set("freeze", {"startAfterEpochs": 1}), "policy None ignores startAfterEpochs"),
    ):
        file.write_text(yaml.safe_dump(job.manifest()))
        assert command(monkeypatch, "plan", str(file)) == 0
        assert said in " ".join("".join(capsys.readouterr()).split())


def test_near_the_end_stages_stay_as_they_are_where_a_new_cut_does_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of 100 steps. Seven of twelve frozen layers save a third of each step, and a pause counts as ten steps."""
    for step, layers in ((20, [6, 3, 2, 1]), (80, [3, 3, 3, 3])):
        freeze = {"policy": "Explicit", "boundaries": [{"step": step, "boundary": 7}]}
        job = make_job().stages(4).workers(4).set("freeze", freeze).set("training", {"steps": 100})
        last = planned(job, tmp_path, monkeypatch, capsys)["phases"][-1]
        assert (last["stageLayers"], last["regroups"]) == (layers, layers != [3, 3, 3, 3])


def test_giving_workers_back_saves_gpu_time_and_keeping_them_idle_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    released = planned(packing_job().set("training.epochs", 20).release(), tmp_path, monkeypatch, capsys)
    held = planned(packing_job().set("training.epochs", 20).on_pack("Hold"), tmp_path, monkeypatch, capsys)
    assert layouts(released) == layouts(held) == [(4, 1), (2, 1), (1, 1)]
    assert [phase["gpus"] for phase in released["phases"]] == [4, 2, 1]
    assert {phase["gpus"] for phase in held["phases"]} == {4}
    assert released["saved"]["gpuTime"] > released["saved"]["time"] == held["saved"]["gpuTime"]


def test_the_bounds_of_the_spec_are_those_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two_workers = packing_job().workers(4, least=2).release().set("training.epochs", 20)
    assert layouts(planned(two_workers, tmp_path, monkeypatch, capsys)) == [(4, 1), (2, 1), (1, 2)]
    two_pipelines = packing_job().set("elasticPolicy.maxPipelines", 2).set("training.epochs", 20)
    assert layouts(planned(two_pipelines, tmp_path, monkeypatch, capsys)) == [(4, 1), (2, 2), (1, 2)]
    held = planned(packing_job().workers(8, most=5).on_pack("Hold"), tmp_path, monkeypatch, capsys)
    assert {phase["gpus"] for phase in held["phases"]} == {5}
    too_few = make_job().stages(4).workers(8, most=5).set("elasticPolicy.minPipelines", 2)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(too_few.manifest()))
    assert command(monkeypatch, "plan", str(tmp_path / "job.yaml")) == 2
    assert "no layout of 4 stages fits 5 workers" in capsys.readouterr().err


def test_savings_are_those_against_the_layout_of_the_start_with_nothing_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    freeze = {"policy": "Explicit", "boundaries": [{"step": 0, "boundary": 8}]}
    plan = planned(packing_job().release().set("freeze", freeze), tmp_path, monkeypatch, capsys)
    (phase,) = plan["phases"]
    assert (phase["stages"], phase["gpus"]) == (2, 2)
    assert 1 - plan["saved"]["gpuTime"] == pytest.approx((1 - plan["saved"]["time"]) / 2)


def test_a_policy_by_gradients_plans_each_boundary_and_no_savings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(packing_job().set("freeze", {"policy": "GradientNorm"}), tmp_path, monkeypatch, capsys)
    assert [phase["frozenLayers"] for phase in plan["phases"]] == list(range(13))
    assert layouts(plan) == [(4, 1), (2, 2), (1, 4)]
    assert plan["saved"] is None


def test_costs_that_were_measured_are_planned_with_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = packing_job().set("pipeline.packing", "Measured").set("training.epochs", 20)
    measured = planned(job, tmp_path, monkeypatch, capsys, "--measure")
    assert len(measured["costs"]["small"]) == 14
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(measured))
    assert planned(job, tmp_path, monkeypatch, capsys, "--costs", str(costs)) == measured
    for change in ("model.hiddenSize=96", "training.precision=Float64"):
        assert command(monkeypatch, "plan", str(tmp_path / "job.yaml"), "--costs", str(costs), "--set", change) == 2
        assert "costs: are of a model of other sizes or another precision" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"small": [], "large": []}, "costs: are of a model of -2 layers, but this one has 12: measure again"),
        ({"micro_batch_sizes": [4, 4]}, "costs: need two sizes of a micro-batch, ascending: measure again"),
        ({"small": [[0, 0, 0, 0]] * 14}, "costs: are all zero: measure again"),
        (None, "holds no costs: it must be the output of plan --measure -o json"),
    ],
)
def test_costs_that_do_not_fit_are_refused(
    change: dict[str, Any] | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file, costs = tmp_path / "job.yaml", tmp_path / "costs.json"
    file.write_text(yaml.safe_dump(packing_job().manifest()))
    given = assumed_costs(12).model_dump(mode="json")
    costs.write_text(json.dumps({"costs": None if change is None else {**given, **change}}))
    assert command(monkeypatch, "plan", str(file), "--costs", str(costs)) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert command(monkeypatch, "plan", str(file), "--costs", str(tmp_path / "none.json")) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_plan_is_printed_as_yaml_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_json = planned(packing_job(), tmp_path, monkeypatch, capsys)
    assert command(monkeypatch, "plan", str(tmp_path / "job.yaml"), "-o", "yaml") == 0
    assert yaml.safe_load(capsys.readouterr().out) == as_json


@pytest.mark.parametrize(("step", "warns"), [(50, False), (100_000, True)])
def test_a_plan_warns_if_no_layer_ever_freezes(
    step: int, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [{"step": step, "boundary": 8}]
    job = packing_job().set("freeze", {"policy": "Explicit", "boundaries": points})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.manifest()))
    assert command(monkeypatch, "plan", str(tmp_path / "job.yaml")) == 0
    assert ("no layer freezes in the" in capsys.readouterr().err) == warns


def test_without_the_trainer_plan_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pipetransformer.library.forecast", None)
    assert command(monkeypatch, "plan", str(DEMO)) == 2
    assert "needs the trainer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "name"), [("model", "script"), ("data", "script"), ("freeze", "Script"), ("pipeline", "Script")]
)
def test_what_only_a_script_has_is_not_planned(
    field: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = {"freeze": "policy", "pipeline": "schedule"}.get(field, "name")
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(make_job().set(f"{field}.{inner}", name).manifest()))
    assert command(monkeypatch, "plan", str(file)) == 2
    assert f"spec.{field}.{inner}: is {name}: plan runs no program" in capsys.readouterr().err


def test_a_job_is_planned_from_what_its_ceiling_lets_it_start_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job().stages(4).workers(8, most=5).set("freeze", {"policy": "None"})
    assert layouts(planned(job, tmp_path, monkeypatch, capsys)) == [(4, 1)]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job.workers(8, most=3).manifest()))
    assert command(monkeypatch, "plan", str(file)) == 2
    assert "spec.elasticPolicy.maxWorkers: no layout of 4 stages fits 3 workers" in capsys.readouterr().err


def test_a_plan_compares_releases_with_the_layout_that_the_ceiling_lets_it_start_with() -> None:
    spec = packing_job().workers(8, most=4).release().set("pipeline.packing", "Measured").job().spec
    forecast = Forecast.of(trainer_spec(spec), assumed_costs(12))
    assert bounds_of(spec, forecast).starting_step_seconds is None

    by_start = packing_job().workers(8, most=4).release().set("pipeline.packing", "Measured")
    by_start.set("elasticPolicy.releaseDownTo", "StartingStep")
    found = bounds_of(by_start.job().spec, forecast).starting_step_seconds
    asked = forecast.starting_step_seconds(Layout(4, 2))
    assert found == forecast.starting_step_seconds(Layout(4, 1))
    assert found is not None and asked is not None and found > 1.5 * asked


def test_a_plan_with_measured_costs_shows_the_candidates_of_each_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"costs": assumed_costs(12).model_dump(mode="json")}))
    job = packing_job().set("pipeline", {"stages": 4, "schedule": "Auto", "packing": "Measured"})
    job = job.set("elasticPolicy.maxPipelines", 1).set("training.epochs", 20)
    plan = planned(job, tmp_path, monkeypatch, capsys, "--costs", str(costs))
    first = plan["phases"][0]
    choice, *others = first["candidates"]
    assert {one["schedule"] for one in first["candidates"]} == {
        "GPipe",
        "OneForwardOneBackward",
        "Interleaved",
        "ZeroBubble",
        "ZeroBubbleV",
    }
    assert (choice["schedule"], choice["whyNot"]) == (first["schedule"], "")
    assert choice["stepSeconds"] == pytest.approx(first["stepSeconds"])
    assert all(one["whyNot"] for one in others)
    assert all(one["stepSeconds"] >= choice["stepSeconds"] for one in others if one["stepSeconds"] is not None)
    assert command(monkeypatch, "plan", str(tmp_path / "job.yaml"), "--costs", str(costs)) == 0
    shown = capsys.readouterr().out
    assert "From step 0: 1 pipeline of 4 stages, 0 frozen layers" in shown and "ZeroBubbleV" in shown
    assert shown.count("chosen") == sum(
        len({one["schedule"] for one in phase["candidates"]}) > 1 for phase in plan["phases"]
    )

    assert all(phase["candidates"] == [] for phase in planned(job, tmp_path, monkeypatch, capsys)["phases"])
    assert command(monkeypatch, "plan", str(tmp_path / "job.yaml")) == 0
    said = capsys.readouterr().out
    assert said.count("Auto chooses once costs are measured") == 1, "layouts with the same reason share a line"


def test_a_plan_lies_between_the_ideal_and_the_static_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = packing_job().set("training.epochs", 20)
    found = planned(job, tmp_path, monkeypatch, capsys, "--ideal")["ideal"]
    times = {name: run["time"] for name, run in found["runs"].items()}
    assert found["boundTime"] < times["ideal"] <= times["job"] < times["static"]
    assert times["ideal"] <= times["staticFrozen"] < times["static"]
    assert found["runs"]["idealReleased"]["gpuTime"] < found["runs"]["ideal"]["gpuTime"]
    assert found["jobOverIdeal"] == pytest.approx(times["job"] / times["ideal"])
    assert found["gpus"] == 4
    larger = packing_job().workers(4, most=8).release().set("training.epochs", 20)
    assert planned(larger, tmp_path, monkeypatch, capsys, "--ideal")["ideal"]["gpus"] == 4, "a release adds none"
    planned(job, tmp_path, monkeypatch, capsys)
    assert (found["exact"], found["cacheCounted"], found["timesInSeconds"]) == (True, False, False)

    assert command(monkeypatch, "plan", str(tmp_path / "job.yaml"), "--ideal") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "this job, as planned" in shown and "best static layout, frozen" in shown and " bound " in shown
    assert "No cache is counted, so each frozen layer still runs forward." in shown


def test_with_measured_costs_the_ideal_counts_the_cache_an_epoch_after_a_freeze(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"costs": assumed_costs(12).model_dump(mode="json")}))
    job = packing_job().set("training.epochs", 20).set("pipeline.packing", "Measured")
    found = planned(job, tmp_path, monkeypatch, capsys, "--ideal", "--costs", str(costs))["ideal"]
    assert found["cacheCounted"] and found["timesInSeconds"]
    steps = [step for step in found["runs"]["staticFrozen"]["steps"] if step["frozenLayers"] == 8]
    assert [step["cachedLayers"] for step in steps] == [0, 8]
    assert steps[1]["stepTime"] < steps[0]["stepTime"]
    assert command(monkeypatch, "plan", str(tmp_path / "job.yaml"), "--ideal", "--costs", str(costs)) == 0
    assert "GPU hours" in capsys.readouterr().out


def test_pipelines_get_shorter_once_frozen_layers_have_left_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU has room for four layers that train and one frozen layer. Eight of twelve layers freeze at step 100."""
    job = packing_job().set("training.epochs", 20).set("pipeline.packing", "Measured")
    units = load_job(trainer_spec(job.job().spec)).layouts.step_model(None)
    room = sum(units.trained_bytes[9:]) + units.unit_bytes[1]
    costs = tmp_path / "costs.json"
    measured = assumed_costs(12).model_copy(update={"worker_bytes": room, "host_apart": True})
    costs.write_text(json.dumps({"costs": measured.model_dump(mode="json")}))

    found = {
        policy: planned(job.set("cache.offloadFrozen", policy), tmp_path, monkeypatch, capsys, "--costs", str(costs))
        for policy in ("Auto", "Never")
    }
    assert command(monkeypatch, "plan", str(tmp_path / "job.yaml"), "--costs", str(costs)) == 0
    assert "have left the GPU" not in capsys.readouterr().out

    def eight(policy: str) -> list[tuple[int, int, int]]:
        phases = [phase for phase in found[policy]["phases"] if phase["frozenLayers"] == 8]
        return [(phase["firstStep"], phase["stages"], phase["offDeviceLayers"]) for phase in phases]

    assert eight("Never") == [(100, 2, 0)]
    assert eight("Auto") == [(100, 2, 0), (123, 1, 8)], "an epoch has 23 steps"
    assert found["Auto"]["saved"]["time"] > found["Never"]["saved"]["time"]
    planned(job.set("cache.offloadFrozen", "Auto"), tmp_path, monkeypatch, capsys)
    assert command(monkeypatch, "plan", str(tmp_path / "job.yaml"), "--ideal", "--costs", str(costs)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "8 (8 off)" in shown and "have left the GPU" in shown
    assert "Frozen layers in the cache are off the GPU" in shown


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), "uses weights that are up to 2, 1, 0 steps old, by stage"),
        (("evaluation.everySteps=2",), "uses weights that are up to 1, 1, 0 steps old, by stage"),
        (("pipeline.stepsPerRound=1",), "uses no old weights"),
        (("evaluation.everySteps=1",), "uses no old weights"),
        (("checkpoint.location=/data", "checkpoint.everySteps=1"), "uses no old weights"),
        (("mirror.everySteps=1",), "uses no old weights"),
        (("training.steps=2",), "uses no old weights"),
        (("freeze.policy=NormChange", "freeze.intervalSteps=1"), "uses no old weights"),
    ],
)
def test_weights_are_as_old_as_the_longest_round_makes_them(
    settings: tuple[str, ...], words: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One micro-batch a step. Only with `stepsPerRound` does the spec say how long a round is."""
    job = make_job().stages(3).workers(3).set("training", {"steps": 40, "globalBatchSize": 8})
    job = job.set("freeze", {"policy": "None"})
    job = job.set("pipeline", {"stages": 3, "schedule": "PipeDream", "microBatchSize": 8})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.manifest()))
    fields = [word for setting in settings for word in ("--set", setting)]
    assert command(monkeypatch, "plan", str(tmp_path / "job.yaml"), *fields) == 0
    assert f"With 3 stages PipeDream {words}.\n" in capsys.readouterr().out


def test_no_ideal_is_shown_if_gradients_decide_when_layers_freeze(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(packing_job().set("freeze", {"policy": "GradientNorm"}).manifest()))
    assert command(monkeypatch, "plan", str(file), "--ideal") == 2
    assert "gradients decide when layers freeze, so --ideal does not know at which steps" in capsys.readouterr().err
