"""Asynchronous jobs through freezes, regroups and deaths have the losses of their replay in one process."""

import random
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.hooks import HookPoint
from pipetransformer_contract.spec import ASYNCHRONOUS, ScheduleName, TrainerSpec
from tests.testkit.trainer import poisoned
from tests.testkit.trainer.asynchronous_replay import replay_worst
from tests.testkit.trainer.harness import Faults, Ran, Scripted, run_job
from tests.testkit.trainer.ledger_checker import check
from tests.testkit.trainer.numerics import ADAMW, EPOCHS, SGD, STAY_ALONE, STEPS_PER_EPOCH, TOLERANCE, TRAINING_SAMPLES
from tests.testkit.trainer.numerics import make_spec as make_synchronous

pytestmark = pytest.mark.timeout(300)

RMSPROP = {"name": "RMSprop", "learningRate": 0.001, "alpha": 0.9}
ADAM = {"name": "Adam", "learningRate": 0.003}


def make_spec(
    optimizer: dict[str, Any], schedule: ScheduleName = ScheduleName.PIPE_OPTIM, **changes: Any
) -> TrainerSpec:
    """Rounds of up to four steps. One layer freezes before step 5, three before step 16, two thaw before step 22."""
    freeze = {
        "policy": "Explicit",
        "boundaries": [{"step": step, "boundary": boundary} for step, boundary in ((5, 1), (16, 3), (22, 1))],
    }
    pipeline = {"stages": 4, "microBatchSize": 22, "schedule": schedule.value, "stepsPerRound": 4}
    made = make_synchronous(optimizer, **({"freeze": freeze, "pipeline": pipeline} | changes))
    return made.model_copy(update={"training": made.training.model_copy(update={"max_gradient_norm": None})})


def check_run(spec: TrainerSpec, run: Ran) -> None:
    """The replay's losses, each sample once an epoch, and every start that a worker went back to bit for bit."""
    worst = replay_worst(spec, run)
    print(f"replay_worst {worst:.1e}, went back {len(run.went_back)} times")
    assert worst <= TOLERANCE
    findings = check(run.run_dir, TRAINING_SAMPLES, EPOCHS)
    assert findings.clean, findings.problems
    assert all(line["equal"] for line in run.went_back)


@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [
        (ScheduleName.PIPE_OPTIM, ADAMW),
        (ScheduleName.PIPE_OPTIM, RMSPROP),
        (ScheduleName.PIPE_DREAM, SGD),
        (ScheduleName.ASYNC_ONE_FORWARD_ONE_BACKWARD, ADAM),
    ],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_losses_through_freezes_and_regroups_are_those_of_the_replay(
    schedule: ScheduleName, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    spec = make_spec(optimizer, schedule)
    script = [
        Scripted(4, 1, [0, 1, 2, 3]),
        Scripted(2, 2, [0, 1, 2, 3], at_step=7),
        Scripted(3, 1, [1, 2, 3], at_step=18, leavers=[0]),
    ]

    run = run_job(spec, script, tmp_path)

    check_run(spec, run)
    assert max(line["stalenessLargest"] for line in run.steps) == 1
    assert {line["generation"] for line in run.steps} == {1, 2, 3}


def test_two_pipelines_of_four_workers_have_the_losses_of_the_replay(tmp_path: Path) -> None:
    pipeline = {"stages": 4, "microBatchSize": 50, "schedule": "PipeOptim", "stepsPerRound": 4}
    spec = make_spec(ADAMW, pipeline=pipeline, workers=8)

    run = run_job(spec, [Scripted(4, 2, list(range(8)))], tmp_path)

    check_run(spec, run)
    assert max(line["stalenessLargest"] for line in run.steps) == 3, "one micro-batch a step in each pipeline"


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_a_lone_stage_has_the_losses_of_a_synchronous_job(schedule: ScheduleName, tmp_path: Path) -> None:
    plain = ScheduleName.ONE_FORWARD_ONE_BACKWARD
    pipeline = {"stages": 4, "microBatchSize": 22, "schedule": plain.value}
    wanted = run_job(make_spec(ADAMW, plain, pipeline=pipeline), STAY_ALONE, tmp_path / "plain")

    run = run_job(make_spec(ADAMW, schedule), STAY_ALONE, tmp_path / "asynchronous")

    for ours, theirs in zip(run.steps, wanted.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert ours["stalenessLargest"] == 0


#: Rounds of generation 1 begin after these steps, if four steps are mirrored at a time.
BEGINS = [1, 5, 8, 12]


def mirrored(optimizer: dict[str, Any], schedule: ScheduleName = ScheduleName.PIPE_OPTIM) -> TrainerSpec:
    freeze = {"policy": "Explicit", "boundaries": [{"step": 5, "boundary": 1}]}
    return make_spec(optimizer, schedule, freeze=freeze, mirror={"everySteps": 4})


def die(seed: int, run_dir: Path) -> tuple[TrainerSpec, Ran]:
    """A job of two pipelines that loses a worker in some round, and then, as one pipeline, another one."""
    chance = random.Random(seed)
    spec = mirrored(chance.choice([ADAMW, SGD, ADAM, RMSPROP]), chance.choice(ASYNCHRONOUS))
    first, second = chance.sample(range(4), 2)
    left = [worker for worker in range(4) if worker != first]
    point = chance.choice([HookPoint.STEPPED, HookPoint.STEPPED, HookPoint.COMPUTED, HookPoint.VOTED])
    step = chance.choice(BEGINS) if point is not HookPoint.STEPPED else chance.choice([1, 2, 3, *range(5, 15)])
    faults = {
        first: Faults(killed_at=(point, step)),
        second: Faults(killed_at=(HookPoint.STEPPED, chance.randint(17, 26))),
    }
    script = [
        Scripted(2, 2, [0, 1, 2, 3]),
        Scripted(3, 1, left, after_loss=first),
        Scripted(2, 1, [worker for worker in left if worker != second], after_loss=second),
    ]
    print(f"seed {seed}: {spec.pipeline.schedule}, {spec.training.optimizer.name}, {faults}")
    run = run_job(spec, script, run_dir, faults=faults)
    assert sorted(run.lost_at) == sorted(faults)
    return spec, run


@pytest.mark.parametrize("seed", range(2))
def test_deaths_inside_rounds_change_no_loss_and_no_sample(seed: int, tmp_path: Path) -> None:
    spec, run = die(seed, tmp_path)
    check_run(spec, run)
    assert run.went_back


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_a_hundred_deaths_inside_rounds_change_no_loss_and_no_sample(seed: int, tmp_path: Path) -> None:
    spec, run = die(seed, tmp_path)
    check_run(spec, run)


def test_a_worker_that_misses_the_vote_of_a_round_commits_all_its_steps_late(tmp_path: Path) -> None:
    spec = mirrored(ADAMW)
    script = [Scripted(2, 2, [0, 1, 2, 3]), Scripted(4, 1, [3, 2, 1, 0], at_step=8)]

    run = run_job(spec, script, tmp_path, faults={1: Faults(loses_vote_of=8)})

    check_run(spec, run)
    assert [line["changed"] for line in run.went_back] == [True]
    assert {line["generation"] for line in run.steps if line["step"] in range(8, 12)} == {1}


def poisoned_steps(run: Ran) -> list[int]:
    return [line["step"] for line in run.steps if line["loss"] is None]


def test_a_round_with_a_step_that_is_not_finite_is_done_again_step_by_step(tmp_path: Path) -> None:
    data = {"name": poisoned.NAME}
    alone = run_job(make_spec(SGD, data=data), STAY_ALONE, tmp_path / "alone")

    run = run_job(make_spec(SGD, data=data), [Scripted(4, 1, [0, 1, 2, 3])], tmp_path / "run")

    assert poisoned_steps(run) == poisoned_steps(alone) != []
    assert [line["step"] for line in run.steps] == list(range(EPOCHS * STEPS_PER_EPOCH))
    assert all(line["equal"] for line in run.went_back) and any(line["changed"] for line in run.went_back)
    for step in poisoned_steps(run):
        assert run.steps[step]["stalenessLargest"] == 0
    assert max(line["stalenessLargest"] for line in run.steps) == 1
    assert check(run.run_dir, TRAINING_SAMPLES, EPOCHS).clean
