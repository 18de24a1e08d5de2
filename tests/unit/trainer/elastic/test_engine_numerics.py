"""A run that regroups computes what one that stays at its first layout computes: losses and gradient norms, every
step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.testkit.trainer.harness import Ran, Scripted, run_job
from tests.testkit.trainer.ledger_checker import check
from tests.testkit.trainer.numerics import (
    ADAMW,
    EPOCHS,
    SGD,
    STAY,
    STAY_ALONE,
    TRAINING_SAMPLES,
    WIDEN,
    compare,
    layouts,
    make_spec,
)

pytestmark = pytest.mark.timeout(180)


RELEASE = [
    Scripted(4, 1, [0, 1, 2, 3]),
    Scripted(2, 1, [2, 3], at_step=6, leavers=[0, 1]),
    Scripted(1, 1, [3], at_step=17, leavers=[2]),
]
CLAIM = [
    Scripted(1, 1, [0]),
    Scripted(2, 2, [0, 1, 2, 3], at_step=6),
    Scripted(4, 1, [3, 2, 1, 0], at_step=17),
]
RECUT = [
    Scripted(4, 1, [0, 1, 2, 3]),
    Scripted(4, 1, [0, 1, 2, 3], at_step=6),
    Scripted(4, 1, [0, 1, 2, 3], at_step=17),
]
UNEVEN = [
    Scripted(3, 1, [0, 1, 2]),
    Scripted(1, 3, [2, 0, 1], at_step=6),
    Scripted(2, 1, [1, 2], at_step=17, leavers=[0]),
]


@pytest.fixture(scope="module", params=[ADAMW, SGD], ids=["adamw", "sgd-momentum"])
def optimizer(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.param
    return chosen


def endings(script: Sequence[Scripted]) -> dict[int, str]:
    """Leavers end as left, and the others as finished."""
    left = {worker for entry in script for worker in entry.leavers}
    everyone = left.union(*(entry.members for entry in script))
    return {worker: "Left" if worker in left else "Finished" for worker in everyone}


@pytest.fixture(scope="module")
def stayed(optimizer: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run that never changes its layout."""
    return run_job(make_spec(optimizer), STAY, tmp_path_factory.mktemp("stay"))


@pytest.mark.parametrize(
    "script",
    [WIDEN, RELEASE, CLAIM, UNEVEN, STAY_ALONE, RECUT],
    ids=["widen", "release", "claim", "uneven", "alone", "recut"],
)
def test_a_run_that_regroups_computes_what_one_that_stays_does(
    script: Sequence[Scripted], optimizer: dict[str, Any], stayed: Ran, tmp_path: Path
) -> None:
    run = run_job(make_spec(optimizer), script, tmp_path)

    compare(run, stayed)
    assert layouts(run) == [(entry.stages, entry.pipelines) for entry in script]
    assert run.endings == endings(script)
    findings = check(tmp_path, TRAINING_SAMPLES, EPOCHS)
    assert findings.clean and findings.redone == 0, findings.problems


def test_gpipe_computes_what_1f1b_does(stayed: Ran, optimizer: dict[str, Any], tmp_path: Path) -> None:
    spec = make_spec(optimizer, pipeline={"stages": 4, "microBatchSize": 22, "schedule": "GPipe"})

    compare(run_job(spec, STAY, tmp_path), stayed)


@pytest.mark.parametrize(
    "freeze",
    [
        {"policy": "GradientNorm", "startAfterEpochs": 0, "intervalSteps": 3, "alpha": 0.3},
        {"policy": "NormChange", "startAfterEpochs": 0, "intervalSteps": 3, "percentile": 50},
    ],
    ids=lambda freeze: str(freeze["policy"]),
)
def test_decisions_by_gradients_do_not_depend_on_the_layout(freeze: dict[str, Any], tmp_path: Path) -> None:
    spec = make_spec(ADAMW, freeze=freeze)
    stayed = run_job(spec, STAY_ALONE, tmp_path / "stay")

    run = run_job(spec, UNEVEN, tmp_path / "run")

    compare(run, stayed)
    boundaries = [step["frozenLayers"] for step in run.steps]
    assert boundaries[-1] > boundaries[0], "nothing froze"


def test_dropout_masks_belong_to_samples_and_not_to_workers(tmp_path: Path) -> None:
    model = {
        "name": "vit", "numLayers": 6, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4, "dropout": 0.1,
    }  # fmt: skip
    spec = make_spec(ADAMW, model=model)

    compare(run_job(spec, WIDEN, tmp_path / "widen"), run_job(spec, STAY_ALONE, tmp_path / "alone"))
