"""A worker that dies costs time and, at worst, the steps since the checkpoint; never a sample, never the result."""

import json
from pathlib import Path

import pytest

from pipetransformer import FreezeObservation, FreezePolicy
from pipetransformer.freeze import Instants
from pipetransformer.hooks import HookPoint
from pipetransformer.storage import latest
from tests.testkit.trainer.harness import Faults, Ran, Scripted, run_job
from tests.testkit.trainer.ledger_checker import check
from tests.testkit.trainer.numerics import ADAMW, EPOCHS, STAY, STAY_ALONE, TRAINING_SAMPLES, compare, make_spec

pytestmark = pytest.mark.timeout(180)


class OneMore(FreezePolicy):
    """Freezes one block more at every fourth step, from the first on."""

    def __init__(self, instants: Instants) -> None:
        pass

    def decide(self, observation: FreezeObservation) -> int:
        return observation.boundary + (observation.step % 4 == 0)


@pytest.fixture(scope="module")
def stayed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run of one worker that never dies."""
    return run_job(make_spec(ADAMW), STAY_ALONE, tmp_path_factory.mktemp("stay"))


@pytest.mark.parametrize("dead", [3, 1, 0], ids=["last-stage", "first-pipeline", "leader"])
def test_survivors_of_a_replicated_stage_redo_no_committed_step(dead: int, stayed: Ran, tmp_path: Path) -> None:
    survivors = [number for number in range(4) if number != dead]
    script = [Scripted(2, 2, [0, 1, 2, 3]), Scripted(3, 1, survivors, after_loss=dead)]

    run = run_job(make_spec(ADAMW), script, tmp_path, faults={dead: Faults(killed_at=(HookPoint.ENDED, 7))})

    compare(run, stayed)
    findings = check(tmp_path, TRAINING_SAMPLES, EPOCHS)
    assert findings.clean and findings.redone == 0


@pytest.mark.parametrize("lagging", [1, 3])
def test_a_worker_that_missed_the_commit_commits_late(lagging: int, stayed: Ran, tmp_path: Path) -> None:
    script = [Scripted(2, 2, [0, 1, 2, 3]), Scripted(4, 1, [0, 1, 2, 3], at_step=8)]

    run = run_job(make_spec(ADAMW), script, tmp_path, faults={lagging: Faults(loses_vote_of=8)})

    compare(run, stayed)
    findings = check(tmp_path, TRAINING_SAMPLES, EPOCHS)
    assert findings.clean and findings.redone == 0


def test_gradients_of_another_generation_do_not_commit_a_redone_step(stayed: Ran, tmp_path: Path) -> None:
    """Both lose the vote of step 5. Worker 0 redoes it beside another, and worker 1 comes back after that."""
    script = [Scripted(1, 2, [0, 1]), Scripted(1, 2, [0, 2], at_step=5), Scripted(1, 2, [0, 1], after_loss=2)]
    faults = {0: Faults(loses_vote_of=5), 1: Faults(loses_vote_of=5), 2: Faults(killed_at=(HookPoint.ENDED, 5))}

    run = run_job(make_spec(ADAMW), script, tmp_path, faults=faults)

    compare(run, stayed)
    assert check(tmp_path, TRAINING_SAMPLES, EPOCHS).clean
    lines = [json.loads(line) for file in tmp_path.glob("ledger/*") for line in file.read_text().splitlines()]
    assert {line["layoutGeneration"] for line in lines if line["step"] == 5} == {2}


def test_a_policy_is_asked_once_though_the_first_generation_breaks(tmp_path: Path) -> None:
    spec = make_spec(
        ADAMW,
        training={"steps": 6, "globalBatchSize": 100, "precision": "Float64"},
        freeze={"policy": "tests.unit.trainer.elastic.test_engine_failure:OneMore"},
        pipeline={"stages": 1, "microBatchSize": 16},
        numShards=2,
        workers=2,
    )
    script = [Scripted(1, 2, [0, 1]), Scripted(1, 1, [0], after_loss=1)]

    run = run_job(spec, script, tmp_path, faults={1: Faults(killed_at=(HookPoint.COMPUTED, 0))})

    frozen = [(event["step"], event["frozenLayers"]) for event in run.events("Frozen")]
    assert frozen == [(0, 1), (4, 2)]


def test_units_of_leavers_outlive_a_vote_that_seemed_to_fail(stayed: Ran, tmp_path: Path) -> None:
    """Both that hold the second stage leave. Of those that get it one dies, and the other does not know of the vote."""
    script = [
        Scripted(2, 2, [0, 1, 2, 3]),
        Scripted(1, 2, [0, 2], at_step=8, leavers=[1, 3]),
        Scripted(1, 1, [0], after_loss=2),
    ]
    faults = {0: Faults(loses_commit_of=2), 2: Faults(killed_at=(HookPoint.AGREED, 2))}

    run = run_job(make_spec(ADAMW), script, tmp_path, faults=faults, watchdog_seconds=5)

    compare(run, stayed)
    findings = check(tmp_path, TRAINING_SAMPLES, EPOCHS)
    assert findings.clean and findings.redone == 0


def test_a_leaver_keeps_units_that_only_it_has_when_a_second_vote_breaks(stayed: Ran, tmp_path: Path) -> None:
    """Worker 2 does not know that it has the second stage. In the next vote, in which it leaves, the joiner dies."""
    script = [
        Scripted(2, 1, [0, 1]),
        Scripted(2, 1, [0, 2], at_step=8, leavers=[1]),
        Scripted(2, 1, [0, 3], after_loss=1, leavers=[2]),
        Scripted(2, 1, [0, 2], after_loss=3),
    ]
    faults = {
        1: Faults(killed_at=(HookPoint.AGREED, 2)),
        2: Faults(loses_commit_of=2),
        3: Faults(killed_at=(HookPoint.ASSEMBLED, 3)),
    }

    run = run_job(make_spec(ADAMW), script, tmp_path, faults=faults, watchdog_seconds=5)

    assert run.lost_at.keys() == {1, 3}
    compare(run, stayed)
    findings = check(tmp_path, TRAINING_SAMPLES, EPOCHS)
    assert findings.clean and findings.redone == 0


def test_a_warm_spare_takes_the_place_of_a_dead_worker(stayed: Ran, tmp_path: Path) -> None:
    script = [Scripted(2, 2, [0, 1, 2, 3]), Scripted(2, 2, [0, 1, 2, 4], after_loss=3)]

    run = run_job(make_spec(ADAMW), script, tmp_path, faults={3: Faults(killed_at=(HookPoint.ENDED, 7))})

    compare(run, stayed)
    assert check(tmp_path, TRAINING_SAMPLES, EPOCHS).clean


def test_all_return_to_the_checkpoint_when_a_stages_only_copy_is_lost(stayed: Ran, tmp_path: Path) -> None:
    spec = make_spec(ADAMW, checkpoint={"location": str(tmp_path / "checkpoint"), "everySteps": 5})
    script = [Scripted(4, 1, [0, 1, 2, 3]), Scripted(3, 1, [0, 2, 3], after_loss=1)]

    run = run_job(spec, script, tmp_path / "run", faults={1: Faults(killed_at=(HookPoint.ENDED, 7))})

    compare(run, stayed)
    findings = check(tmp_path / "run", TRAINING_SAMPLES, EPOCHS)
    assert findings.clean
    assert findings.redone in (3, 8), "all since step 5, or from the start if that was not yet written"


@pytest.mark.parametrize("dead", [0, 2], ids=["leader", "middle"])
def test_a_neighbours_mirror_saves_a_lone_stage_and_bounds_redone_steps(dead: int, stayed: Ran, tmp_path: Path) -> None:
    survivors = [number for number in range(4) if number != dead]
    script = [Scripted(4, 1, [0, 1, 2, 3]), Scripted(3, 1, survivors, after_loss=dead)]

    run = run_job(
        make_spec(ADAMW, mirror={"everySteps": 4}),
        script,
        tmp_path,
        faults={dead: Faults(killed_at=(HookPoint.VOTED, 6))},
    )

    compare(run, stayed)
    findings = check(tmp_path, TRAINING_SAMPLES, EPOCHS)
    assert findings.clean and findings.redone <= 4


def test_without_a_checkpoint_a_lost_stage_starts_the_job_again(stayed: Ran, tmp_path: Path) -> None:
    script = [Scripted(4, 1, [0, 1, 2, 3]), Scripted(3, 1, [0, 2, 3], after_loss=1)]

    run = run_job(make_spec(ADAMW), script, tmp_path, faults={1: Faults(killed_at=(HookPoint.ENDED, 7))})

    compare(run, stayed)
    findings = check(tmp_path, TRAINING_SAMPLES, EPOCHS)
    assert findings.clean and findings.redone == 8


def test_a_joiner_whose_data_differ_ends_nothing_that_trains(tmp_path: Path) -> None:
    """Neither at the growth nor when it is told to leave again."""
    training = {"steps": 12, "globalBatchSize": 12, "optimizer": ADAMW}
    spec = make_spec(ADAMW, data={"name": "tests.testkit.user_code.unseeded_data:load"}, training=training)
    script = [Scripted(1, 1, [0]), Scripted(1, 2, [0, 1], at_step=4), Scripted(1, 1, [0], at_step=8, leavers=[1])]

    run = run_job(spec, script, tmp_path)

    assert run.endings == {0: "Finished", 1: "Left"}
    assert [entry["generation"] for entry in run.summary["generations"]] == [1, 3]
    assert [step["step"] for step in run.steps] == list(range(12))


def test_a_new_job_numbers_its_generations_above_an_earlier_job(tmp_path: Path) -> None:
    spec = make_spec(ADAMW, checkpoint={"location": str(tmp_path / "checkpoint"), "everySteps": 2})
    shorter = spec.model_copy(update={"training": spec.training.model_copy(update={"epochs": None, "steps": 2})})
    run_job(shorter, STAY_ALONE, tmp_path / "run")
    (ledger,) = (tmp_path / "run" / "ledger").iterdir()
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    ledger.with_name("w7.jsonl").write_text(f"{json.dumps(lines[-1] | {'step': 2, 'layoutGeneration': 6})}\n")

    longer = spec.model_copy(update={"training": spec.training.model_copy(update={"epochs": None, "steps": 4})})
    run_job(longer, STAY_ALONE, tmp_path / "run", job_uid="another")

    found = [json.loads(line)["layoutGeneration"] for line in ledger.read_text().splitlines()]
    assert found == [1, 1, 7, 7]


@pytest.mark.parametrize(
    ("job_uid", "number", "num_shards"),
    [("job", 4, 4), pytest.param("another", 1, 2, marks=pytest.mark.slow), ("another", 1, 8)],
    ids=["the-same", "a-new-job-of-fewer-pipelines", "a-new-job-that-may-have-more"],
)
def test_a_job_resumes_from_its_checkpoint_at_another_size(
    job_uid: str, number: int, num_shards: int, stayed: Ran, tmp_path: Path
) -> None:
    spec = make_spec(ADAMW, checkpoint={"location": str(tmp_path / "checkpoint"), "everySteps": 5})
    everyone = dict.fromkeys(range(4), Faults(killed_at=(HookPoint.ENDED, 17)))
    run_job(spec, STAY, tmp_path / "run", faults=everyone, first_generation=3)

    script = [Scripted(2, 2, [0, 1, 2, 3])]
    resumed = spec.model_copy(update={"num_shards": num_shards})
    run = run_job(resumed, script, tmp_path / "run", first_generation=number, job_uid=job_uid)

    compare(run, stayed)
    findings = check(tmp_path / "run", TRAINING_SAMPLES, EPOCHS)
    assert findings.clean
    # The newest checkpoint that was durable before everybody died is of step 10, 15 or later. The freeze asks for one
    # after step 16; it begins once that of step 15 is complete.
    assert findings.redone in (8, 3, 2, 1)
    written = latest(str(tmp_path / "checkpoint"))
    assert written is not None and (written.step, written.layout_generation) == (30, 4)
    reported = [report.checkpoint for report in run.reports if report.checkpoint is not None]
    assert (reported[-1].step, reported[-1].layout_generation) == (30, number)
    assert reported[0].layout_generation == (3 if job_uid == "job" else 0)
    assert reported[0].num_shards == spec.training.global_batch_size
