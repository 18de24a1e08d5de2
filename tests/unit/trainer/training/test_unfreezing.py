"""Blocks freeze and train again: what is frozen does not move by a bit, and regroups change no number."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pipetransformer.freeze.boundary import first_trainable
from pipetransformer.hooks import HookPoint
from pipetransformer.job.load import load_job
from pipetransformer.models import unit_name
from pipetransformer.state.control import Control
from pipetransformer.storage.files import Folder
from pipetransformer.storage.store import MARKER, CheckpointInfo, load_unit
from pipetransformer.training.after_step import stages_too_few
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Faults, Ran, Scripted, run_job
from tests.testkit.trainer.ledger_checker import check
from tests.testkit.trainer.numerics import ADAMW, EPOCHS, SGD, STAY_ALONE, TRAINING_SAMPLES, compare, layouts, make_spec

pytestmark = pytest.mark.timeout(180)

NUM_LAYERS = 6
BOUNDARIES = [(3, 2), (7, 4), (9, 5), (12, 1), (16, 6), (20, 0), (26, 3)]
REGROUPED = [
    Scripted(3, 1, [0, 1, 2]),
    Scripted(1, 3, [2, 0, 1], at_step=5),
    Scripted(3, 1, [0, 2, 1], at_step=10),
    Scripted(2, 1, [1, 2], at_step=18, leavers=[0]),
    Scripted(1, 2, [2, 1], at_step=22),
]


def spec_of(optimizer: dict[str, Any], **changes: Any) -> TrainerSpec:
    freeze = {"policy": "Explicit", "boundaries": [{"step": s, "boundary": b} for s, b in reversed(BOUNDARIES)]}
    return make_spec(optimizer | {"weightDecay": 0.1}, freeze=freeze, **changes)


def boundary_at(step: int) -> int:
    """Blocks frozen while step `step` is trained."""
    return max(((s, b) for s, b in BOUNDARIES if s <= step), default=(0, 0))[1]


@pytest.fixture(scope="module", params=[ADAMW, SGD], ids=["adamw", "sgd-momentum"])
def optimizer(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.param
    return chosen


@pytest.fixture(scope="module")
def stayed(optimizer: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_job(spec_of(optimizer), STAY_ALONE, tmp_path_factory.mktemp("stay"))


def weights_by_step(location: str) -> dict[int, list[dict[str, torch.Tensor]]]:
    """Parameters of every unit in each checkpoint, by its step; of a step with two, the newer generation's."""
    folder = Folder(location)
    infos = [
        CheckpointInfo.model_validate_json(folder.read(f"{name}/{MARKER}"))
        for name in folder.names()
        if folder.exists(f"{name}/{MARKER}")
    ]
    return {
        info.step: [
            {name: tensor for name, tensor in load_unit(location, info, unit).items() if "@" not in name}
            for unit in (unit_name(index, NUM_LAYERS) for index in range(NUM_LAYERS + 2))
        ]
        for info in sorted(infos, key=lambda info: info.layout_generation)
    }


def test_regroups_among_freezes_change_no_number_and_no_frozen_bit(
    optimizer: dict[str, Any], stayed: Ran, tmp_path: Path
) -> None:
    location = str(tmp_path / "checkpoints")
    checkpoint = {"location": location, "everySteps": 1, "keep": 1000}
    spec = spec_of(optimizer, checkpoint=checkpoint, cache={"policy": "Always"})

    run = run_job(spec, REGROUPED, tmp_path / "run")

    compare(run, stayed)
    assert layouts(run) == [(entry.stages, entry.pipelines) for entry in REGROUPED]
    weights = weights_by_step(location)
    periods = list(pairwise(sorted(weights)))
    assert len(periods) > 5, "checkpoints are written while training goes on, so not all steps have one"
    for first, last in periods:
        frozen = min(first_trainable(boundary_at(step)) for step in range(first, last))
        for index, (before, after) in enumerate(zip(weights[first], weights[last], strict=True)):
            same = all(torch.equal(before[name], after[name]) for name in before)
            assert same == (index < frozen), (first, last, index)


@pytest.mark.parametrize(
    "behind",
    [lambda step: Faults(loses_decision_after=step), lambda step: Faults(loses_vote_of=step)],
    ids=["broke-before-what-follows-a-step", "missed-the-commit"],
)
@pytest.mark.parametrize(
    "step", [pytest.param(8, id="freeze"), pytest.param(11, id="unfreeze", marks=pytest.mark.slow)]
)
def test_a_worker_behind_a_moved_boundary_sends_what_the_others_expect(
    behind: Callable[[int], Faults], step: int, optimizer: dict[str, Any], stayed: Ran, tmp_path: Path
) -> None:
    script = [Scripted(2, 1, [0, 1]), Scripted(1, 2, [0, 1], at_step=step)]

    run = run_job(spec_of(optimizer), script, tmp_path, faults={1: behind(step)})

    compare(run, stayed)


def test_going_back_to_a_mirror_goes_back_to_its_boundary(
    optimizer: dict[str, Any], stayed: Ran, tmp_path: Path
) -> None:
    script = [Scripted(3, 1, [0, 1, 2]), Scripted(2, 1, [0, 2], after_loss=1)]
    faults = {1: Faults(killed_at=(HookPoint.ENDED, 15))}

    run = run_job(spec_of(optimizer, mirror={"everySteps": 10}), script, tmp_path, faults=faults)

    compare(run, stayed)
    findings = check(tmp_path, TRAINING_SAMPLES, EPOCHS)
    assert findings.clean and findings.redone == 6


def test_a_restart_begins_with_the_pipeline_that_its_boundary_needs() -> None:
    job = load_job(spec_of(ADAMW))
    assert [job.layouts.min_stages(boundary) for boundary in (0, 2, 4, 6)] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("stages", "fell_step", "too_few"),
    [(4, 0, 4), (4, 10, 4), (4, 11, None), (2, 11, 2)],
    ids=["never fell", "cut since it fell", "cut before it fell", "packed"],
)
def test_a_full_pipeline_cut_while_layers_were_frozen_is_not_too_short(
    stages: int, fell_step: int, too_few: int | None
) -> None:
    """Otherwise the job would end as the user's error, where the next generation, cut anew, may fit."""
    job, control = load_job(spec_of(ADAMW)), Control(step=12, boundary=1, fell_step=fell_step)
    assert stages_too_few(job, control, stages, first_step=10) == too_few
