"""Workers die at every moment of a round and of a regroup, never by clock: the result is that of the unharmed run."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipetransformer_contract.spec import TrainerSpec
from tests.chaos import KILLS, Chaos, draw
from tests.ledger_checker import check
from tests.trainer_harness import Ran, Scripted, run_job
from tests.unit.trainer.test_engine_numerics import ADAMW, TOLERANCE, TRAINING_SAMPLES, make_spec

pytestmark = pytest.mark.timeout(300)

STEPS = 15  # one epoch
#: What a job keeps besides its replicas in memory. Where nothing is kept, one whose last replica dies begins anew.
KEPT: list[list[str]] = [[], ["checkpoint"], ["mirror"], ["checkpoint", "mirror"]]
#: Under 2 s on an idle machine; the bound is for a busy one.
SECONDS_TO_THE_NEXT_STEP = 10.0


def spec(folder: Path, kept: Sequence[str] = ()) -> TrainerSpec:
    """One epoch; a block freezes before step 3, two more before step 8. What is kept is kept every second step."""
    keeps: dict[str, Any] = {
        "checkpoint": {"location": str(folder), "everySteps": 2},
        "mirror": {"everySteps": 2},
    }
    base = make_spec(
        ADAMW,
        freeze={"policy": "Explicit", "boundaries": [{"step": 3, "boundary": 1}, {"step": 8, "boundary": 3}]},
        **{name: keeps[name] for name in kept},
    )
    return base.model_copy(update={"training": base.training.model_copy(update={"epochs": 1})})


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run in which nobody dies."""
    folder = tmp_path_factory.mktemp("unharmed")
    return run_job(spec(folder), [Scripted(1, 1, [0])], folder)


def check_run(run: Ran, unharmed: Ran) -> None:
    """The newest line of every step is the unharmed run's, and every sample was used once."""
    newest = {step["step"]: step for step in run.steps}
    assert sorted(newest) == list(range(STEPS))
    for theirs in unharmed.steps:
        ours = newest[theirs["step"]]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE), ours["step"]
        assert ours["gradientNorm"] == pytest.approx(theirs["gradientNorm"], rel=TOLERANCE), ours["step"]
        assert ours["frozenLayers"] == theirs["frozenLayers"], ours["step"]
    assert run.summary["test_accuracy"] == unharmed.summary["test_accuracy"]
    findings = check(run.run_dir, TRAINING_SAMPLES, 1)
    assert findings.clean, findings.problems


def seconds_to_the_next_step(run: Ran) -> list[float]:
    """From each death to the end of the first step after those that still stand from before it."""
    found = []
    for lost in run.lost_at.values():
        before = max((step["step"] for step in run.steps if step["time"] <= lost), default=-1)
        later = [step["time"] for step in run.steps if step["time"] > lost and step["step"] > before]
        found += [min(later) - lost] if later else []
    return found


def run_chaos(chaos: Chaos, seed: int, folder: Path, kept: Sequence[str]) -> Ran:
    print(f"seed {seed}, kept: {', '.join(kept) or 'nothing'}: {chaos}")
    return run_job(spec(folder / "checkpoint", kept), chaos.script, folder / "run", faults=chaos.faults)


@pytest.mark.parametrize("draw_number", range(2))
def test_a_job_survives_deaths_at_any_moment(draw_number: int, unharmed: Ran, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1000, 1_000_000)  # printed with what it draws
    chaos = draw(seed, STEPS)
    run = run_chaos(chaos, seed, tmp_path, KEPT[seed % len(KEPT)])

    assert sorted(run.lost_at) == sorted(chaos.faults)
    check_run(run, unharmed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_a_hundred_deaths_change_nothing_and_cost_seconds(seed: int, unharmed: Ran, tmp_path: Path) -> None:
    run = run_chaos(draw(seed, STEPS), seed, tmp_path, KEPT[seed % len(KEPT)])

    assert len(run.lost_at) == KILLS
    check_run(run, unharmed)
    seconds = seconds_to_the_next_step(run)
    print(f"seconds from each death to the next new step: {[round(s, 2) for s in seconds]}")
    assert all(s < SECONDS_TO_THE_NEXT_STEP for s in seconds)
