"""A trial in a run: regroups and a death within it change no loss and no decision."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.hooks import HookPoint
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Faults, Ran, Scripted, run_job
from tests.testkit.trainer.numerics import ADAMW, STAY_ALONE, TOLERANCE, layouts, make_spec

pytestmark = pytest.mark.timeout(180)

STEPS = 40
#: All layers freeze while the loss still falls fast, so that it leaves its trend.
FROZEN_AT, THAWED_AT = 12, 22


def spec_of(freeze: dict[str, Any]) -> TrainerSpec:
    training = {
        "steps": STEPS,
        "globalBatchSize": 100,
        "optimizer": ADAMW,
        "precision": "Float64",
        "seed": 1,
    }
    return make_spec(ADAMW, training=training, freeze=freeze)


BAD = spec_of(
    {"policy": "Explicit", "boundaries": [{"step": FROZEN_AT, "boundary": 6}], "trial": {"steps": 10, "backoff": 4}}
)


@pytest.fixture(scope="module")
def stayed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_job(BAD, STAY_ALONE, tmp_path_factory.mktemp("stay"))


def boundary_moves(run: Ran) -> list[tuple[int, int]]:
    frozen = [0, *(step["frozenLayers"] for step in run.steps)]
    return [(step, now) for step, (before, now) in enumerate(pairwise(frozen)) if now != before]


def compare(run: Ran, reference: Ran) -> None:
    assert [step["step"] for step in run.steps] == list(range(STEPS))
    for ours, theirs in zip(run.steps, reference.steps, strict=True):
        assert ours["frozenLayers"] == theirs["frozenLayers"], ours["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE), ours["step"]
        assert ours["gradientNorm"] == pytest.approx(theirs["gradientNorm"], rel=TOLERANCE), ours["step"]


def test_a_freeze_that_harms_thaws_and_the_run_says_why(stayed: Ran) -> None:
    assert boundary_moves(stayed) == [(FROZEN_AT, 6), (THAWED_AT, 0)]
    said = [event["whyThawed"] for event in stayed.events("Frozen")]
    assert said[0] == "" and said[1].startswith("layers 0-5 thawed: training loss ")
    assert {report.why_thawed for report in stayed.reports if report.step >= THAWED_AT} == {said[1]}


@pytest.mark.parametrize(
    "script",
    [
        [
            Scripted(3, 1, [0, 1, 2]),
            Scripted(1, 3, [2, 0, 1], at_step=15),
            Scripted(2, 1, [1, 2], at_step=25, leavers=[0]),
        ],
        [
            Scripted(1, 2, [0, 1]),
            Scripted(2, 1, [0, 1], at_step=FROZEN_AT),
            Scripted(1, 1, [0], at_step=THAWED_AT, leavers=[1]),
        ],
    ],
    ids=["within-the-trial", "where-it-begins-and-ends"],
)
def test_regroups_in_a_trial_change_no_loss_and_no_decision(
    script: list[Scripted], stayed: Ran, tmp_path: Path
) -> None:
    run = run_job(BAD, script, tmp_path)

    compare(run, stayed)
    assert layouts(run) == [(one.stages, one.pipelines) for one in script]


def test_a_death_in_a_trial_changes_no_decision(stayed: Ran, tmp_path: Path) -> None:
    script = [Scripted(1, 2, [0, 1]), Scripted(1, 1, [1], after_loss=0)]
    faults = {0: Faults(killed_at=(HookPoint.COMMITTED, THAWED_AT - 1))}

    run = run_job(BAD, script, tmp_path, faults=faults)

    compare(run, stayed)
    assert run.lost_at.keys() == {0} and layouts(run) == [(1, 2), (1, 1)]


def test_a_run_that_regroups_loses_a_worker_and_resumes_in_a_trial_ends_it_as_one_that_does_not(
    stayed: Ran, tmp_path: Path
) -> None:
    checkpoint = {"location": str(tmp_path / "checkpoints"), "everySteps": 1}
    first = BAD.model_copy(
        update={
            "training": BAD.training.model_copy(update={"steps": 18}),
            "checkpoint": TrainerSpec.model_validate(
                BAD.model_dump(by_alias=True, exclude_defaults=True) | {"checkpoint": checkpoint}
            ).checkpoint,
        }
    )
    before = [
        Scripted(3, 1, [0, 1, 2]),
        Scripted(1, 2, [0, 1], at_step=FROZEN_AT + 1, leavers=[2]),
        Scripted(1, 1, [1], after_loss=0),
    ]
    run_job(first, before, tmp_path / "run", faults={0: Faults(killed_at=(HookPoint.VOTED, 15))})
    whole = first.model_copy(update={"training": BAD.training})
    after = [Scripted(2, 1, [0, 1]), Scripted(1, 2, [1, 0], at_step=19)]

    resumed = run_job(whole, after, tmp_path / "run", first_generation=len(before) + 1, job_uid="another")

    compare(resumed, stayed)
    assert layouts(resumed) == [(3, 1), (1, 2), (1, 1), (2, 1), (1, 2)]
    assert resumed.summary["steps_redone"] == 0


def test_a_freeze_that_is_kept_stays_in_all_layouts_and_the_record_says_so_once(tmp_path: Path) -> None:
    spec = spec_of(
        {
            "policy": "Explicit",
            "boundaries": [{"step": FROZEN_AT, "boundary": 2}],
            "trial": {"steps": 10, "tolerance": 0.9},
        }
    )
    alone = run_job(spec, STAY_ALONE, tmp_path / "alone")
    script = [Scripted(1, 2, [0, 1]), Scripted(2, 1, [0, 1], at_step=15), Scripted(1, 1, [1], after_loss=0)]
    faults = {0: Faults(killed_at=(HookPoint.COMMITTED, 18))}

    run = run_job(spec, script, tmp_path / "run", faults=faults)

    assert boundary_moves(alone) == [(FROZEN_AT, 2)]
    compare(run, alone)
    kept = run.events("FreezeKept")
    assert [(event["step"], event["frozenLayers"]) for event in kept] == [(THAWED_AT, 2)]
    assert kept[0]["why"].startswith("layers 0-1 stay frozen: training loss ")
    since = {report.boundary_step for report in alone.reports if report.step > THAWED_AT}
    assert since == {THAWED_AT}, "a checkpoint from the trial starts in its layout, so it covers no smaller one"


NOT_THE_MIDDLE = spec_of(
    {
        "policy": "Explicit",
        "boundaries": [{"step": 3, "boundary": 2}, {"step": 9, "boundary": 6}],
        "never": ["blocks.4.*.bias"],
        "always": ["blocks.2", "blocks.5.*weight"],
    }
)


def test_what_always_and_never_name_is_alike_in_all_layouts(tmp_path: Path) -> None:
    alone = run_job(NOT_THE_MIDDLE, STAY_ALONE, tmp_path / "alone")
    script = [
        Scripted(4, 1, [0, 1, 2, 3]),
        Scripted(2, 2, [0, 1, 2, 3], at_step=6),
        Scripted(1, 3, [1, 2, 3], at_step=14, leavers=[0]),
        Scripted(3, 1, [3, 1, 2], at_step=20),
    ]

    run = run_job(NOT_THE_MIDDLE, script, tmp_path / "run")

    assert boundary_moves(alone) == [(3, 2), (9, 4)]
    compare(run, alone)
