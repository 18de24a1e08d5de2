"""Levels that cannot be made are refused before any worker is ready, and a level is a job of its own."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pipetransformer.errors import SpecError
from pipetransformer.job.levels import next_level
from pipetransformer.job.load import load_job
from pipetransformer.multilevel.axes import FAMILIES, Family
from pipetransformer.state.control import Control
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.levels import level_job, level_spec

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": (
        {"levels": {"widthFactor": 3}},
        "spec.multiLevel.widthFactor: GPT2LMHeadModel has hidden_size 32, which cannot be divided by 3 for the smallest"
        " level: lower widthFactor or levels",
    ),
    "layers": (
        {"num_layers": 3},
        "spec.multiLevel.depthFactor: the model has 3 layers, which cannot be divided by 2 for the smallest"
        " level: lower depthFactor or levels",
    ),
    "layers of three levels": (
        {"levels": {"levels": 3}, "num_layers": 6, "training": {"steps": 30}},
        "spec.multiLevel.depthFactor: the model has 6 layers, which cannot be divided by 4",
    ),
    "stages": (
        {"pipeline": {"stages": 4}, "workers": 4},
        "spec.multiLevel.levels: the smallest level has 2 layers, fewer than the 4 stages",
    ),
    "steps of their own": (
        {"pipeline": {"schedule": "PipeDream", "stages": 2}, "workers": 2},
        "spec.multiLevel: multiLevel needs another schedule than",
    ),
    "no step left": ({"training": {"steps": 6}}, "spec.multiLevel: multiLevel needs training.steps above"),
    "no checkpoint": ({"checkpoint": None}, "spec.multiLevel: multiLevel needs spec.checkpoint"),
    "no difference": (
        {"levels": {"depthFactor": 1, "widthFactor": 1}},
        "spec.multiLevel.depthFactor: a depthFactor or widthFactor above 1 is needed",
    ),
    "freezing inside": (
        {"freeze": {"policy": "Explicit", "boundaries": [{"step": 5, "boundary": 1}]}},
        "spec.freeze.boundaries: layers would freeze after 5 steps, but the last visit of multiLevel begins after 6:"
        " freeze after 7 or more",
    ),
    "freezing before the last visit has a step": (
        {"freeze": {"policy": "Explicit", "boundaries": [{"step": 3, "boundary": 0}, {"step": 6, "boundary": 1}]}},
        "spec.freeze.boundaries: layers would freeze after 6 steps,",
    ),
    "freezing from a step": (
        {"freeze": {"policy": "PaperSchedule", "startAfterSteps": 3}},
        "spec.freeze.startAfterSteps: decisions would begin after 3 steps, but the last visit of multiLevel begins"
        " after 6: begin after 6 or more",
    ),
    "freezing from the start": (
        {"freeze": {"policy": "NormChange"}},
        "spec.freeze.startAfterSteps: decisions would begin after 0 steps",
    ),
    "freezing from an epoch": (
        {"freeze": {"policy": "PaperSchedule", "startAfterEpochs": 0}},
        "spec.freeze.startAfterEpochs: decisions would begin after 0 steps",
    ),
    "constants": ({"freeze": {"always": ["embedding"]}}, "spec.freeze.always: cannot be used with multiLevel"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_levels_that_cannot_be_made_are_refused(case: str, tmp_path: Path) -> None:
    fields, words = REFUSED[case]

    with pytest.raises(SpecError) as refused:
        level_job("gpt2-tied", tmp_path, **fields)

    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    "freeze",
    [
        {"policy": "Explicit", "boundaries": [{"step": 7, "boundary": 1}]},
        {"policy": "PaperSchedule", "startAfterSteps": 6, "intervalSteps": 1},
    ],
)
def test_freezing_after_a_step_of_the_last_visit_is_taken(freeze: dict[str, Any], tmp_path: Path) -> None:
    assert level_job("gpt2-tied", tmp_path, freeze=freeze).policy.next_decision(6) == 7


@pytest.mark.parametrize("heads", [{"num_attention_heads": 4, "num_key_value_heads": 1}])
def test_heads_of_keys_have_to_divide_too(heads: dict[str, int], tmp_path: Path) -> None:
    spec = level_spec("llama", tmp_path)
    model = spec.model.model_copy(update={"options": {**spec.model.options, **heads}})

    with pytest.raises(SpecError, match=r"widthFactor: LlamaForCausalLM has num_key_value_heads 1"):
        load_job(spec.model_copy(update={"model": model}))


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ({r"positions\.weight": ".."}, r"embedding\.positions\.weight would become \(1024, 32\), not \(1024, 16\)"),
        ({}, r"it is unknown how to narrow the parameter positions\.weight"),
    ],
)
def test_a_family_whose_table_contradicts_the_model_is_refused(
    positions: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of transformers may have other parameters than the table."""
    table = dict(FAMILIES["GPT2LMHeadModel"].table)
    assert table.pop(r"(tokens|positions)\.weight") == ".w"
    table |= {r"tokens\.weight": ".w", **positions}
    monkeypatch.setitem(FAMILIES, "GPT2LMHeadModel", Family(table))

    with pytest.raises(SpecError, match=rf"^spec\.multiLevel\.widthFactor: must be 1, because {words}$"):
        level_job("gpt2-tied", tmp_path)


def own_model(width_factor: int, folder: Path) -> TrainerSpec:
    causal = "tests.testkit.user_code.causal_model"
    return TrainerSpec.model_validate(
        {
            "model": {"name": f"{causal}:make_model", "numLayers": 4, "options": {"num_layers": 4}},
            "data": {"name": f"{causal}:make_data"},
            "training": {"steps": 12, "globalBatchSize": 8},
            "checkpoint": {"location": str(folder)},
            "multiLevel": {"descentSteps": 2, "ascentSteps": 4, "widthFactor": width_factor},
        }
    )


def test_a_users_own_model_may_change_in_depth_alone(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"widthFactor: must be 1, because it is unknown how .*causal_model"):
        load_job(own_model(2, tmp_path))

    small = load_job(own_model(1, tmp_path)).at(1)

    assert small.num_layers == 2
    assert [tie.places[-1][0] for tie in small.model.ties.all] == [3], "the head is unit 3 now"


def test_a_level_is_a_job_with_another_model_and_the_same_run(tmp_path: Path) -> None:
    training = {"optimizer": {"noDecay": ["*.bias", "blocks.3.*"]}, "steps": 40}
    job = level_job("own-vit", tmp_path, levels={"levels": 3, "grouping": "Adjacent"}, training=training, num_layers=8)

    levels = [job.at(visit) for visit in range(5)]

    assert [level.level for level in levels] == [0, 1, 2, 1, 0]
    assert [level.num_layers for level in levels] == [8, 4, 2, 4, 8]
    assert [level.model.activation[-1] for level in levels] == [32, 16, 8, 16, 32]
    assert levels[1] is levels[3] and levels[4] is job
    assert all(
        level.identity == job.identity and level.layouts.bytes_budget == job.layouts.bytes_budget for level in levels
    )
    assert sum(levels[1].unit_bytes) < sum(job.unit_bytes) / 4
    assert "blocks.0.mlp.0.bias" in levels[2].no_decay and "blocks.0.mlp.0.weight" not in levels[2].no_decay
    assert job.identity["multiLevel"]["descentSteps"] == 2


def test_a_visit_ends_at_the_step_that_the_spec_fixes(tmp_path: Path) -> None:
    job = level_job("own-vit", tmp_path)

    ends = [
        job.visit_ends(Control(step=step, visit=visit)) for visit, step in ((0, 1), (0, 2), (1, 5), (1, 6), (2, 12))
    ]

    assert ends == [False, True, False, True, False]
    assert [job.is_last(visit) for visit in range(3)] == [False, False, True]


def test_a_level_change_reads_no_configuration_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lie in storage or on a hub, and all workers wait while the leader plans."""
    job = level_job("gpt2-tied", tmp_path)
    monkeypatch.setattr("pipetransformer.models.widths.import_huggingface", pytest.fail)

    down, up = (next_level(job, None, Control(visit=visit, visit_done=True), 1) for visit in (0, 1))

    assert down is not None and up is not None and (down.down, up.down) == (True, False)
    assert down.levels is up.levels


def test_a_level_knows_the_data_of_the_whole_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the job learned before its first step is not asked again for each level, which is reached later."""
    job = level_job("own-vit", tmp_path)
    asked = Mock(return_value="read once")
    monkeypatch.setattr("pipetransformer.job.job.digest", asked)
    of_the_job = (job.data_digest, job.training_digest)
    count = asked.call_count

    small = job.at(1)

    assert (small.data_digest, small.training_digest) == of_the_job
    assert small.dataset is job.dataset, "it knows whether inputs change"
    assert asked.call_count == count
    assert small.whole is job and small.at(0) is job and small.at(1) is small


@pytest.mark.parametrize(("visit", "stages", "goes_on"), [(0, 1, True), (1, 1, False), (1, 2, True)])
def test_a_regroup_makes_the_next_level_only_where_its_model_fits(
    visit: int, stages: int, goes_on: bool, tmp_path: Path
) -> None:
    """A death in the change may leave fewer stages than the change began with."""
    job = level_job("own-vit", tmp_path, pipeline={"stages": 2}, workers=2)

    assert next_level(job, None, Control(visit=visit), stages) is None, "the visit is not done"
    state_map = next_level(job, None, Control(visit=visit, visit_done=True), stages)

    assert (state_map is not None) == goes_on
