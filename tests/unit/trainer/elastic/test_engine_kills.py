"""Workers die at every moment of a round and of a regroup, never by clock: the result is that of the unharmed run."""

import random
from pathlib import Path

import pytest

from tests.testkit.trainer.chaos import KILLS, draw
from tests.testkit.trainer.harness import Ran, Scripted, run_job
from tests.testkit.trainer.kills import KEPT, STEPS, run_chaos, seconds_to_the_next_step, spec
from tests.testkit.trainer.ledger_checker import check
from tests.testkit.trainer.numerics import TOLERANCE, TRAINING_SAMPLES

pytestmark = pytest.mark.timeout(300)

#: Under 2 s on an idle machine; the bound is for a busy one.
SECONDS_TO_THE_NEXT_STEP = 10.0


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
