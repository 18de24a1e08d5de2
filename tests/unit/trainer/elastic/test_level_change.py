"""A V-cycle through regroups, deaths in a level change and a resume trains as in one place that never moves."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from pipetransformer.hooks import HookPoint
from pipetransformer.storage import latest, load_model
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.equality import BAR_FLOAT64, committed
from tests.testkit.trainer.harness import Faults, Ran, Scripted, run_job
from tests.testkit.trainer.levels import level_spec

pytestmark = pytest.mark.timeout(240)

DOWN, UP, STEPS = 3, 7, 11
LEVELS = {"descentSteps": DOWN, "ascentSteps": UP - DOWN, "ascentLearningRate": 0.004}
POINTS = [HookPoint.MET, HookPoint.MOVING, HookPoint.ASSEMBLED, HookPoint.AGREED]


def spec_of(folder: Path, *, family: str = "own-vit", **fields: Any) -> TrainerSpec:
    training = {"steps": STEPS, "globalBatchSize": 8, "optimizer": {"learningRate": 0.003, "weightDecay": 0.01}}
    freeze = {"policy": "Explicit", "boundaries": [{"step": UP + 1, "boundary": 1}]}
    given = {"freeze": freeze, "numShards": 2, "workers": 4, "pipeline": {"microBatchSize": 2}, **fields}
    return level_spec(family, folder, training=training, levels=LEVELS, **given)


@pytest.fixture(scope="module")
def stayed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("stayed")
    return run_job(spec_of(folder), [Scripted(1, 1, [0])], folder / "run")


def check_same(run: Ran, reference: Ran) -> None:
    ours, theirs = committed(run), committed(reference)
    assert sorted(ours) == sorted(theirs) == list(range(STEPS))
    for step, line in theirs.items():
        same = [ours[step][key] == line[key] for key in ("level", "frozenLayers", "learningRate", "epoch")]
        assert all(same), step
        for key in ("loss", "gradientNorm"):
            assert ours[step][key] == pytest.approx(line[key], rel=BAR_FLOAT64), (step, key)


def test_a_cycle_without_moves_visits_the_levels_at_the_steps_of_the_spec(stayed: Ran) -> None:
    assert [line["level"] for line in stayed.steps] == [0] * DOWN + [1] * (UP - DOWN) + [0] * (STEPS - UP)
    assert [line["frozenLayers"] for line in stayed.steps][-3:] == [1, 1, 1]
    changes = stayed.events("LevelChanged")
    assert [(change["level"], change["layers"], change["firstStep"]) for change in changes] == [(1, 2, 3), (0, 4, 7)]
    assert len(stayed.summary["generations"]) == 1, "a level change is no generation"
    assert load_model(str(stayed.run_dir / "model")).num_layers == 4


def test_weights_that_are_not_interpolated_are_not_kept(stayed: Ran, tmp_path: Path) -> None:
    spec = level_spec("own-vit", tmp_path, training={"steps": STEPS}, levels={**LEVELS, "alpha": 1.0})

    run = run_job(spec, [Scripted(1, 1, [0])], tmp_path / "run")

    assert [line["level"] for line in run.steps] == [line["level"] for line in stayed.steps]
    kept = [(folder / "checkpoints" / "levels").exists() for folder in (stayed.run_dir.parent, tmp_path)]
    assert kept == [True, False]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([Scripted(2, 2, [0, 1, 2, 3])], id="one layout"),
        pytest.param(
            [Scripted(2, 1, [0, 1]), Scripted(1, 2, [0, 1], at_step=4), Scripted(2, 2, [0, 1, 2, 3], at_step=6)],
            id="regroups inside the levels",
        ),
        pytest.param(
            [
                Scripted(2, 2, [0, 1, 2, 3]),
                Scripted(1, 1, [1], leavers=[0, 2, 3], at_step=DOWN - 1),
                Scripted(2, 1, [1, 4], at_step=UP - 1),
            ],
            id="regroups at the changes",
        ),
        pytest.param(
            [Scripted(2, 2, [0, 1, 2, 3]), Scripted(2, 1, [0, 1], leavers=[2, 3], at_step=DOWN)],
            id="published as a level ends",
        ),
    ],
)
def test_regroups_do_not_change_a_cycle(script: list[Scripted], stayed: Ran, tmp_path: Path) -> None:
    run = run_job(spec_of(tmp_path), script, tmp_path / "run")

    check_same(run, stayed)
    assert run.summary["samples_lost"] == run.summary["samples_repeated"] == run.summary["steps_redone"] == 0


@pytest.mark.parametrize("step", [DOWN, UP])
@pytest.mark.parametrize("point", POINTS)
def test_a_death_in_a_level_change_changes_nothing(point: HookPoint, step: int, stayed: Ran, tmp_path: Path) -> None:
    """Its replicas hold all that it held."""
    script = [Scripted(2, 2, [0, 1, 2, 3]), Scripted(2, 1, [0, 1], at_step=step, leavers=[3], after_loss=2)]

    run = run_job(spec_of(tmp_path), script, tmp_path / "run", faults={2: Faults(killed_in_level_change=(point, step))})

    assert 2 in run.lost_at
    check_same(run, stayed)
    assert run.summary["steps_redone"] == 0


def test_a_change_does_not_count_before_the_weights_of_the_larger_level_are_durable(
    stayed: Ran, tmp_path: Path
) -> None:
    """All workers have the smaller model when one dies. The next generation leaves the larger level once more."""
    script = [Scripted(2, 2, [0, 1, 2, 3]), Scripted(2, 1, [0, 1], leavers=[3], after_loss=2)]
    faults = {number: Faults(keeps_once_broken=True) for number in (0, 1)}
    faults[2] = Faults(killed_in_level_change=(HookPoint.ASSEMBLED, DOWN))

    run = run_job(spec_of(tmp_path), script, tmp_path / "run", faults=faults)

    check_same(run, stayed)
    assert run.summary["steps_redone"] == 0


def test_workers_told_to_stop_while_the_storage_takes_no_weights_leave_at_the_larger_level(
    stayed: Ran, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path)
    faults = {number: Faults(stopped_while_keeping=True) for number in (0, 1)}

    stopped = run_job(spec, [Scripted(2, 1, [0, 1])], tmp_path / "run", faults=faults)

    assert stopped.endings == {0: "Stopped", 1: "Stopped"}
    left = latest(str(tmp_path / "checkpoints"))
    assert left is not None and (left.step, left.num_layers) == (DOWN, 4)
    check_same(run_job(spec, [Scripted(1, 2, [0, 1])], tmp_path / "run", job_uid="next"), stayed)


@pytest.mark.parametrize("step", [DOWN, UP])
def test_a_worker_that_misses_the_vote_of_a_change_has_both_models(step: int, stayed: Ran, tmp_path: Path) -> None:
    """Only worker 0 lives and knows that the change is committed; two others have the rest of the new model."""
    script = [Scripted(2, 2, [0, 1, 2, 3]), Scripted(2, 1, [0, 1], leavers=[3], after_loss=2)]
    faults = {number: Faults(loses_level_change=step) for number in (1, 3)}
    faults[2] = Faults(killed_in_level_change=(HookPoint.AGREED, step))

    run = run_job(spec_of(tmp_path), script, tmp_path / "run", faults=faults)

    assert 2 in run.lost_at
    check_same(run, stayed)
    assert run.summary["steps_redone"] == 0
    assert not [change for change in run.events("LevelChanged") if change["firstStep"] == step], "no step was made"


@pytest.mark.parametrize("point", [HookPoint.MET, HookPoint.AGREED])
def test_a_generation_that_is_published_while_a_lone_worker_changes_the_level_makes_the_change(
    point: HookPoint, stayed: Ran, tmp_path: Path
) -> None:
    script = [Scripted(1, 1, [0]), Scripted(1, 2, [0, 1], at_step=UP + 1)]
    faults = {0: Faults(outdated_level_change=UP, outdated_at=point)}

    run = run_job(spec_of(tmp_path), script, tmp_path / "run", faults=faults)

    check_same(run, stayed)
    assert [change["firstStep"] for change in run.events("LevelChanged")] == [DOWN], "the other is a regroup's"


def test_a_model_that_does_not_fit_waits_for_a_longer_pipeline(stayed: Ran, tmp_path: Path) -> None:
    """It makes no step, says so, and asks for the workers that it needs."""
    spec = spec_of(tmp_path, pipeline={"stages": 2, "microBatchSize": 2})
    script = [
        Scripted(2, 1, [0, 1]),
        Scripted(1, 1, [0], leavers=[1], at_step=DOWN + 1),
        Scripted(2, 1, [0, 2], at_step=UP),
    ]

    run = run_job(spec, script, tmp_path / "run")

    check_same(run, stayed)
    ahead = [report for report in run.reports if report.upcoming is not None]
    assert {(report.level, report.upcoming.step, report.upcoming.level) for report in ahead if report.upcoming} == {
        (1, UP, 0)
    }
    assert all([offer.stages for offer in report.offers] == [2] for report in ahead), "one stage does not hold it"
    waiting = [report for report in ahead if report.upcoming is not None and report.upcoming.waits]
    assert {report.step for report in waiting} == {UP}
    assert waiting[0].newer_than(run.reports[run.reports.index(waiting[0]) - 1])
    first_steps = {event["generation"]: event["firstStep"] for event in run.events("GenerationCommitted")}
    assert sorted(first_steps) == [1, 2, 3] and first_steps[3] == UP, "it makes its first step with the larger model"
    assert [event["firstStep"] for event in run.events("LevelChanged")] == [DOWN]


@pytest.mark.parametrize("step", [DOWN, UP])
@pytest.mark.parametrize("every", [1, 2])
def test_a_mirror_of_the_level_before_saves_a_lone_stage(every: int, step: int, stayed: Ran, tmp_path: Path) -> None:
    """A worker dies in the first step of a level, and only workers' mirrors of the level before have its units."""
    spec = spec_of(tmp_path, mirror={"everySteps": every})
    script = [Scripted(2, 1, [0, 1]), Scripted(1, 1, [0], after_loss=1)]

    run = run_job(spec, script, tmp_path / "run", faults={1: Faults(killed_at=(HookPoint.VOTED, step))})

    check_same(run, stayed)
    assert 1 <= run.summary["steps_redone"] <= every


@pytest.mark.parametrize(("last_step", "layout"), [(4, (1, 1)), (4, (2, 2)), (8, (1, 2)), (1, (2, 1))])
def test_a_resume_at_any_level_and_size_goes_on(
    last_step: int, layout: tuple[int, int], stayed: Ran, tmp_path: Path
) -> None:
    """All workers die after a checkpoint; another job takes it up."""
    spec = spec_of(tmp_path, checkpoint={"location": str(tmp_path / "checkpoints"), "everySteps": 1})
    faults = {number: Faults(killed_at=(HookPoint.ENDED, last_step)) for number in (0, 1)}
    run_job(spec, [Scripted(2, 1, [0, 1])], tmp_path / "run", faults=faults)

    members = list(range(layout[0] * layout[1]))
    run = run_job(spec, [Scripted(*layout, members)], tmp_path / "run", job_uid="next")

    check_same(run, stayed)


def test_transformers_loads_what_a_cycle_trained(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, family="gpt2-tied")

    moved = run_job(spec, [Scripted(2, 1, [0, 1]), Scripted(1, 2, [0, 1], at_step=5)], tmp_path / "moved")
    alone = spec_of(tmp_path / "alone", family="gpt2-tied")
    check_same(moved, run_job(alone, [Scripted(1, 1, [0])], tmp_path / "alone" / "run"))

    model = transformers.GPT2LMHeadModel.from_pretrained(moved.run_dir / "model")
    assert (model.config.n_layer, model.config.n_head, model.config.n_embd) == (4, 8, 32)


def test_a_generation_is_entered_after_an_earlier_one_failed_and_the_level_changed(stayed: Ran, tmp_path: Path) -> None:
    """The joiner of the second generation dies, so the leader goes on in the first one, and there changes the level."""
    script = [Scripted(1, 1, [0]), Scripted(1, 2, [0, 1], at_step=DOWN - 2), Scripted(1, 1, [0], at_step=UP - 2)]

    run = run_job(spec_of(tmp_path), script, tmp_path / "run", faults={1: Faults(killed_at=(HookPoint.ASSEMBLED, 2))})

    check_same(run, stayed)
    assert [generation["generation"] for generation in run.summary["generations"]] == [1, 3]
