"""The run's record, its ledger, and the checker that shares no code with it."""

import json
import subprocess
import sys
import tracemalloc
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.data import EpochOrder, deal
from pipetransformer.errors import StorageError
from pipetransformer.record import CacheLog, Ledger, Role, RunRecord, audit, lines, newest_generation
from pipetransformer.record.cache_use import cache_summary
from tests.testkit.trainer import ledger_checker

SAMPLES, EPOCHS = 50, 2
ORDER = EpochOrder(seed=0, num_samples=SAMPLES, global_batch=16, num_shards=4)
NUM_STEPS = EPOCHS * ORDER.steps_per_epoch


@pytest.fixture
def picture() -> None:
    """Here one is drawn."""


def note(
    run_dir: Path, worker: str, step: int, pipeline: int, *, generation: int = 1, pipelines: int = 2, drop: int = 0
) -> None:
    """Write one worker's line of what a pipeline of one stage trained, less the last `drop` samples."""
    dealt = deal(ORDER.batch(step), pipelines, 5)[pipeline]
    ids = [i for micro_batch in dealt for i in micro_batch.real_ids]
    Ledger(run_dir, worker).append(
        step=step,
        epoch=ORDER.epoch(step),
        layout_generation=generation,
        stages=1,
        pipelines=pipelines,
        pipeline=pipeline,
        sample_ids=ids[: len(ids) - drop],
    )


def commit_step(run_dir: Path, step: int, *, generation: int = 1, pipelines: int = 2, drop: int = 0) -> None:
    """Write the ledger lines that a committed step leaves, less the last `drop` samples of pipeline 0."""
    for pipeline in range(pipelines):
        less = drop if pipeline == 0 else 0
        note(run_dir, f"job-w{pipeline}", step, pipeline, generation=generation, pipelines=pipelines, drop=less)


def commit_all(run_dir: Path) -> None:
    for step in range(NUM_STEPS):
        commit_step(run_dir, step, pipelines=1 + step % 4, generation=1 + step)


def both(run_dir: Path) -> tuple[int | None, int | None, int]:
    """What audit and checker agree on: lost, repeated, redone."""
    found, checked = audit(run_dir, ORDER, 0, NUM_STEPS), ledger_checker.check(run_dir, SAMPLES, EPOCHS)
    assert (found.lost, found.repeated, found.redone_steps) == (checked.lost, checked.repeated, checked.redone)
    return found.lost, found.repeated, found.redone_steps


def test_a_run_that_changes_width_every_step_loses_and_repeats_nothing(tmp_path: Path) -> None:
    commit_all(tmp_path)
    assert both(tmp_path) == (0, 0, 0)
    assert ledger_checker.check(tmp_path, SAMPLES, EPOCHS).clean


def test_redone_steps_count_apart(tmp_path: Path) -> None:
    commit_all(tmp_path)
    commit_step(tmp_path, 3, generation=100, pipelines=1)
    assert both(tmp_path) == (0, 0, 1)


def test_a_lost_sample_is_found(tmp_path: Path) -> None:
    commit_all(tmp_path)
    commit_step(tmp_path, 2, generation=100, drop=2)
    assert both(tmp_path) == (2, 0, 1)


def test_a_sample_of_another_step_is_found_as_repeated(tmp_path: Path) -> None:
    commit_all(tmp_path)
    Ledger(tmp_path, "job-w9").append(
        step=1, epoch=0, layout_generation=2, stages=1, pipelines=2, pipeline=9, sample_ids=ORDER.batch(0)[0][:1]
    )
    assert both(tmp_path) == (0, 1, 0)


@pytest.mark.parametrize("ids", [[SAMPLES], [-1], [SAMPLES, 10**9]])
def test_an_id_of_no_sample_counts_as_repeated(ids: list[int], tmp_path: Path) -> None:
    commit_all(tmp_path)
    Ledger(tmp_path, "job-w9").append(
        step=1, epoch=0, layout_generation=2, stages=1, pipelines=2, pipeline=9, sample_ids=ids
    )
    found = audit(tmp_path, ORDER, 0, NUM_STEPS)
    assert (found.lost, found.repeated) == (0, len(ids))


def test_steps_of_an_earlier_run_beyond_the_end_of_this_one_were_in_vain(tmp_path: Path) -> None:
    commit_all(tmp_path)
    commit_step(tmp_path, NUM_STEPS, generation=1)
    assert audit(tmp_path, ORDER, 0, NUM_STEPS).redone_steps == 1


def share(step: int, pipeline: int, pipelines: int = 2) -> int:
    """Samples of one pipeline in one step."""
    return sum(len(micro_batch.real_ids) for micro_batch in deal(ORDER.batch(step), pipelines, 5)[pipeline])


def audited(run_dir: Path, started_at: int = 0) -> tuple[int, int | None, int | None, int]:
    """First step, lost, repeated, unaudited."""
    found = audit(run_dir, ORDER, started_at, NUM_STEPS)
    return found.first_step, found.lost, found.repeated, found.unaudited


def remove(run_dir: Path, worker: str, *steps: int) -> None:
    """Lose a worker's lines of these steps."""
    path = run_dir / "ledger" / f"{worker}.jsonl"
    kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] not in steps]
    path.write_text("".join(kept))


def test_a_pipeline_whose_ledger_is_elsewhere_is_unknown_and_not_lost(tmp_path: Path) -> None:
    for step in range(NUM_STEPS):
        note(tmp_path, "job-w0", step, 0)
    assert audited(tmp_path) == (0, None, None, sum(share(step, 1) for step in range(NUM_STEPS)))


def test_a_hole_in_the_ledgers_that_are_there_is_lost_and_what_is_elsewhere_hides_none(tmp_path: Path) -> None:
    for step in range(NUM_STEPS):
        note(tmp_path, "job-w0", step, 0, drop=2 if step == 4 else 0)
    remove(tmp_path, "job-w0", 2)
    elsewhere = sum(share(step, 1) for step in range(NUM_STEPS))
    assert audited(tmp_path) == (0, 2 + share(2, 0), None, elsewhere)


@pytest.mark.parametrize("steps", [[0], [3], [NUM_STEPS - 1], [2, 3]])
@pytest.mark.parametrize("workers", [["job-w0"], ["job-w0", "job-w1"]], ids=["one", "all"])
def test_where_all_workers_share_a_record_every_hole_is_lost(
    workers: list[str], steps: list[int], tmp_path: Path
) -> None:
    for step in range(NUM_STEPS):
        commit_step(tmp_path, step, generation=1 + (step > 2))
    for worker in workers:
        remove(tmp_path, worker, *steps)
    gone = sum(share(step, int(worker[-1])) for worker in workers for step in steps)
    assert audited(tmp_path) == (0, gone, 0, 0)


def test_what_survivors_note_for_the_dead_does_not_stand_for_their_ledgers(tmp_path: Path) -> None:
    """The second worker leads once the first is dead, in a folder of its own."""
    for step in range(4):
        note(tmp_path, "job-w1", step, 1)
    note(tmp_path, "job-w1", 3, 0)
    for step in range(4, NUM_STEPS):
        note(tmp_path, "job-w1", step, 0, generation=2, pipelines=1)
    assert audited(tmp_path, started_at=4) == (0, None, None, sum(share(step, 0) for step in range(3)))


def test_a_worker_makes_the_folders_of_its_ledger(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "first"
    note(run_dir, "job-w1", 0, 0)
    assert [line["step"] for line in lines.read(run_dir / "ledger" / "job-w1.jsonl")] == [0]


def test_steps_after_the_end_of_a_workers_ledger_are_unknown_if_its_peers_write_elsewhere(tmp_path: Path) -> None:
    for step in range(4):
        note(tmp_path, "job-w0", step, 0)
    assert audited(tmp_path) == (0, None, None, EPOCHS * SAMPLES - sum(share(step, 0) for step in range(4)))


def test_a_redone_step_and_a_hole_after_it_are_audited_by_the_generation_that_redid_it(tmp_path: Path) -> None:
    """The peer of the first generation wrote elsewhere; the second generation is one worker, whose ledger is here."""
    for step in range(4):
        note(tmp_path, "job-w0", step, 0)
    for step in [3, *range(5, NUM_STEPS)]:
        note(tmp_path, "job-w0", step, 0, generation=2, pipelines=1)
    assert audited(tmp_path) == (0, ORDER.batch_size(4), None, sum(share(step, 1) for step in range(3)))


def test_a_run_that_goes_on_from_elsewhere_is_audited_from_there(tmp_path: Path) -> None:
    for step in range(3, NUM_STEPS):
        commit_step(tmp_path, step, generation=5)
    assert audited(tmp_path, started_at=3) == (3, 0, 0, 0)
    remove(tmp_path, "job-w1", 5)
    assert audited(tmp_path, started_at=3) == (3, share(5, 1), 0, 0)


def test_steps_that_another_record_may_have_are_unknown(tmp_path: Path) -> None:
    """The generations between, 2 to 4, wrote into another folder."""
    for step in [0, 1, *range(4, NUM_STEPS)]:
        commit_step(tmp_path, step, generation=1 if step < 2 else 5)
    assert audited(tmp_path) == (0, None, None, ORDER.batch_size(2) + ORDER.batch_size(3))


@pytest.mark.parametrize(("complete", "lost"), [(True, ORDER.batch_size(2)), (False, None)])
def test_a_hole_between_two_generations_is_lost_if_both_are_complete(
    complete: bool, lost: int | None, tmp_path: Path
) -> None:
    """Otherwise the workers that are missing here may have noted the step."""
    for step in range(NUM_STEPS):
        if step != 2:
            commit_step(tmp_path, step, generation=1 if step < 2 else 2)
    if not complete:
        remove(tmp_path, "job-w1", *range(3, NUM_STEPS))
    assert audited(tmp_path)[1] == lost


def test_a_record_without_ledgers_knows_nothing(tmp_path: Path) -> None:
    assert audited(tmp_path) == (0, None, None, EPOCHS * SAMPLES)


def test_the_summary_says_what_is_unknown(tmp_path: Path) -> None:
    write_run(tmp_path)
    for path in (tmp_path / "ledger").glob("*.jsonl"):
        if path.stem != "job-w0":
            path.unlink()
    summary = RunRecord(tmp_path).finish(metrics={}, model_step=NUM_STEPS, num_steps=NUM_STEPS, order=ORDER)
    assert (summary["samples_lost"], summary["samples_repeated"], summary["audited_from_step"]) == (None, None, 0)
    elsewhere = sum(share(step, pipeline, 4) for step in range(3, NUM_STEPS) for pipeline in (1, 2, 3))
    assert summary["samples_unaudited"] == elsewhere


def test_the_audit_of_a_long_run_needs_a_few_bytes_a_sample(tmp_path: Path) -> None:
    order = EpochOrder(seed=0, num_samples=100_000, global_batch=10_000, num_shards=4)
    ledger = Ledger(tmp_path, "job-w0")
    for step in range(order.steps_per_epoch):
        ids = [sample_id for shard in order.batch(step) for sample_id in shard]
        ledger.append(step=step, epoch=0, layout_generation=1, stages=1, pipelines=1, pipeline=0, sample_ids=ids)

    tracemalloc.start()
    found = audit(tmp_path, order, 0, order.steps_per_epoch)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (found.lost, found.repeated) == (0, 0)
    assert peak < 50 * order.num_samples


def test_stages_of_a_pipeline_may_all_note_the_same_line(tmp_path: Path) -> None:
    commit_all(tmp_path)
    for line in (tmp_path / "ledger" / "job-w0.jsonl").read_text().splitlines(keepends=True):
        with (tmp_path / "ledger" / "job-w5.jsonl").open("a") as file:
            file.write(line)
    assert both(tmp_path) == (0, 0, 0)


def test_the_checker_sees_a_worker_that_committed_a_step_twice(tmp_path: Path) -> None:
    commit_all(tmp_path)
    commit_step(tmp_path, 0, generation=1, pipelines=1)
    assert ledger_checker.check(tmp_path, SAMPLES, EPOCHS).repeated == 16


def test_the_checker_sees_workers_that_disagree(tmp_path: Path) -> None:
    commit_all(tmp_path)
    Ledger(tmp_path, "job-w5").append(
        step=0, epoch=0, layout_generation=1, stages=1, pipelines=1, pipeline=0, sample_ids=[1]
    )
    assert "disagree" in ledger_checker.check(tmp_path, SAMPLES, EPOCHS).problems[0]


@pytest.mark.parametrize(("epochs", "status"), [(EPOCHS, 0), (EPOCHS + 1, 1), (EPOCHS - 1, 1)])
def test_the_checker_is_a_command_that_fails_on_a_wrong_history(tmp_path: Path, epochs: int, status: int) -> None:
    commit_all(tmp_path)
    command = [
        sys.executable,
        ledger_checker.__file__,
        str(tmp_path),
        "--samples",
        str(SAMPLES),
        "--epochs",
        str(epochs),
    ]
    assert subprocess.run(command, capture_output=True).returncode == status


def test_the_checker_refuses_a_run_without_a_ledger(tmp_path: Path) -> None:
    assert not ledger_checker.check(tmp_path, SAMPLES, EPOCHS).clean


def roles(stages: int, pipelines: int) -> list[Role]:
    each = 12 // stages
    return [
        Role(
            f"job-w{rank}",
            rank // stages,
            rank % stages,
            [range(each * (rank % stages), each * (rank % stages + 1))],
        )
        for rank in range(stages * pipelines)
    ]


def write_run(run_dir: Path) -> None:
    """A run of two generations, each written by its own leader's record."""
    first_steps = {1: range(3), 2: range(3, NUM_STEPS)}
    for generation, (stages, pipelines) in {1: (4, 1), 2: (1, 4)}.items():
        record = RunRecord(run_dir)
        record.started(step=first_steps[generation].start, job="job")
        record.generation_committed(
            generation=generation,
            stages=stages,
            pipelines=pipelines,
            frozen_layers=11 * (generation - 1),
            first_step=first_steps[generation].start,
            pause_seconds=0.5,
            phases={"move": 1.0, "vote": 0.5, "first step": 0.2},
            transfers=[(0, 1, 600), (0, 2, 400)],
            roles=roles(stages, pipelines),
            schedule="OneForwardOneBackward",
            why_schedule="" if stages > 1 else "Interleaved needs at least 2 stages",
            frozen_forward="InPlace",
            why_frozen_forward="" if stages > 1 else "a lone stage is never idle",
        )
        for step in first_steps[generation]:
            commit_step(run_dir, step, generation=generation, pipelines=pipelines)
            record.step(
                step=step,
                epoch=ORDER.epoch(step),
                samples=ORDER.batch_size(step),
                loss=None if step == 1 else 1 / (step + 1),
                gradient_norm=1.0,
                learning_rate=0.1,
                samples_per_second=100.0,
                idle_share=0.25,
                generation=generation,
                frozen_layers=11 * (generation - 1),
                frozen_ahead_share=0.0,
            )
        if generation == 1:
            record.frozen(step=3, frozen_layers=11, generation=1)


def test_the_summary_is_computed_from_the_files_of_all_leaders(tmp_path: Path) -> None:
    write_run(tmp_path)
    RunRecord(tmp_path).finish(metrics={"accuracy": 0.9}, model_step=NUM_STEPS, num_steps=NUM_STEPS, order=ORDER)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0 < summary["wall_seconds"] < 60
    assert (summary["test_accuracy"], summary["samples_lost"], summary["samples_repeated"]) == (0.9, 0, 0)
    assert summary["generations"][1] == {
        "generation": 2,
        "stages": 1,
        "pipelines": 4,
        "frozen_layers": 11,
        "first_step": 3,
        "pause_seconds": 0.5,
        "total_seconds": 1.5,
        "bytes_moved": 1000,
        "phases": {"move": 1.0, "vote": 0.5, "first step": 0.2},
        "transfers": [[0, 1, 600], [0, 2, 400]],
        "schedule": "OneForwardOneBackward",
        "why_schedule": "Interleaved needs at least 2 stages",
        "frozen_forward": "InPlace",
        "why_frozen_forward": "a lone stage is never idle",
    }
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kinds == ["Started", "GenerationCommitted", "Frozen", "GenerationCommitted", "Finished"]


def test_a_new_record_names_the_layers_of_each_worker_and_what_was_measured(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "first"
    write_run(run_dir)
    RunRecord(run_dir).step(
        step=NUM_STEPS, epoch=0, samples=0, loss=None, gradient_norm=None, learning_rate=0.1, generation=2,
        frozen_layers=0,
    )  # fmt: skip

    committed = next(event for event in lines.read(run_dir / "events.jsonl") if "roles" in event)
    assert [role["layers"] for role in committed["roles"]] == [[[0, 2]], [[3, 5]], [[6, 8]], [[9, 11]]]
    steps = [*lines.read(run_dir / "steps.jsonl")]
    assert (steps[0]["idleShare"], steps[-1]["idleShare"]) == (0.25, None), "nobody measured the last step"


def test_a_run_that_resumed_a_checkpoint_is_audited_from_that_step(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    assert record.started(step=3, job="job")
    assert not RunRecord(tmp_path).started(step=3, job="job"), "another leader of the job does not start it again"
    for step in range(4, NUM_STEPS):
        commit_step(tmp_path, step, generation=5)
    summary = record.finish(metrics={}, model_step=1, num_steps=NUM_STEPS, order=ORDER)
    assert (summary["audited_from_step"], summary["steps"]) == (3, NUM_STEPS)


def test_a_record_that_two_jobs_wrote_is_audited_from_the_start_of_the_first(tmp_path: Path) -> None:
    write_run(tmp_path)
    RunRecord(tmp_path).started(step=3, job="another")
    for path in (tmp_path / "ledger").glob("*.jsonl"):
        remove(tmp_path, path.stem, 0, 1, 2)
    summary = RunRecord(tmp_path).finish(metrics={}, model_step=1, num_steps=NUM_STEPS, order=ORDER)
    assert summary["audited_from_step"] == 0


def test_a_summary_has_no_metric_that_is_not_finite(tmp_path: Path) -> None:
    write_run(tmp_path)
    metrics = {"accuracy": 0.5, "loss": float("nan"), "f1": float("inf")}
    summary = RunRecord(tmp_path).finish(metrics=metrics, model_step=1, num_steps=NUM_STEPS, order=ORDER)
    assert summary["metrics"] == {"accuracy": 0.5}
    assert [*lines.read(tmp_path / "events.jsonl")][-1]["metrics"] == {"accuracy": 0.5}


def test_the_use_of_the_caches_is_summed_up_over_workers_by_epoch_and_layout(tmp_path: Path) -> None:
    noted = [("w0", 0, 2, 0, 8), ("w1", 0, 2, 0, 8), ("w0", 1, 2, 6, 2), ("w1", 1, 2, 6, 1), ("w0", 1, 1, 4, 0)]
    noted += [("w0", 2, 1, 0, 0), ("w0", 3, 1, 1, 0)]
    for worker, epoch, pipelines, hits, computed in noted:
        counts = {"hits": hits, "advanced": int(epoch < 2), "computed": computed, "memoryBytes": 100}
        log = CacheLog(tmp_path, worker)
        log.append(step=0, epoch=epoch, layout_generation=1, pipelines=pipelines, counts=counts)
    summary = cache_summary(tmp_path)
    assert list(summary[0]) == ["epoch", "pipelines", "hits", "advanced", "computed", "hit_rate"]
    found = [tuple(one.values()) for one in summary]
    assert found[:3] == [(0, 2, 0, 2, 16, 0.0), (1, 1, 4, 1, 0, 4 / 5), (1, 2, 12, 2, 3, 12 / 17)]
    assert found[3:] == [(2, 1, 0, 0, 0, 0.0), (3, 1, 1, 0, 0, 1.0)]
    first = next(lines.read(tmp_path / "cache" / "w1.jsonl"))
    assert first == {
        "step": 0, "epoch": 0, "layoutGeneration": 1, "pipelines": 2,
        "hits": 0, "advanced": 1, "computed": 8, "memoryBytes": 100,
    }  # fmt: skip


def test_a_record_is_rewound_to_where_a_new_leader_goes_on(tmp_path: Path) -> None:
    write_run(tmp_path)
    record = RunRecord(tmp_path)

    steps = record.last_step() + 1
    record.rewind(3)
    assert record.redone_steps == steps - 3 > 0
    record.rewind(3)
    assert record.redone_steps == 0

    assert record.last_step() == 2
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 3


def test_a_new_job_from_the_start_sets_the_record_of_another_aside(tmp_path: Path) -> None:
    write_run(tmp_path)
    CacheLog(tmp_path, "w0").append(
        step=0, epoch=0, layout_generation=1, pipelines=1, counts={"hits": 1, "advanced": 0, "computed": 0}
    )
    RunRecord(tmp_path).finish(metrics={}, model_step=NUM_STEPS, num_steps=NUM_STEPS, order=ORDER)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    before = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(before) > 5

    RunRecord(tmp_path).started(step=0, job="another")
    commit_all(tmp_path)

    (aside,) = (tmp_path / "earlier").iterdir()
    assert {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()} == before
    assert [event["job"] for event in lines.read(tmp_path / "events.jsonl")] == ["another"]
    assert both(tmp_path) == (0, 0, 0)
    RunRecord(tmp_path).started(step=0, job="another")
    assert list((tmp_path / "earlier").iterdir()) == [aside], "it starts again, and stays the same job"


def test_a_job_that_goes_on_from_a_checkpoint_of_none_of_a_record_sets_it_aside(tmp_path: Path) -> None:
    write_run(tmp_path)
    for job, earlier_job in (("second", "job"), ("third", "job"), ("third", "job")):
        RunRecord(tmp_path).started(step=3, job=job, earlier_job=earlier_job)
    assert not (tmp_path / "earlier").exists()

    for job in ("fourth", "fifth"):
        RunRecord(tmp_path).started(step=3, job=job, earlier_job="elsewhere")
    assert [event["job"] for event in lines.read(tmp_path / "events.jsonl")] == ["fifth"]
    asides = [[*lines.read(aside / "events.jsonl")] for aside in (tmp_path / "earlier").iterdir()]
    assert sorted(events[-1]["job"] for events in asides) == ["fourth", "third"], "also of the same second"


def test_the_newest_generation_of_a_record_is_also_one_that_its_leader_did_not_note(tmp_path: Path) -> None:
    write_run(tmp_path)
    noted = newest_generation(tmp_path)
    for step, number in ((0, noted + 1), (1, noted + 2)):
        Ledger(tmp_path, "w9").append(
            step=step, epoch=0, layout_generation=number, stages=1, pipelines=1, pipeline=0, sample_ids=range(100_000)
        )
    assert newest_generation(tmp_path) == noted + 2
    (tmp_path / "ledger" / "w10.jsonl").touch()
    assert newest_generation(tmp_path) == noted + 2, "a worker that wrote nothing yet"
    assert newest_generation(tmp_path / "nowhere") == 0


def test_a_new_job_that_goes_on_adds_to_the_record_of_the_one_before(tmp_path: Path) -> None:
    write_run(tmp_path)

    RunRecord(tmp_path).started(step=3, job="another")
    RunRecord(tmp_path).started(step=0, job="another")

    started = [event["job"] for event in lines.read(tmp_path / "events.jsonl") if event["kind"] == "Started"]
    assert started == ["job", "another"]
    assert not (tmp_path / "earlier").exists()


@pytest.mark.parametrize("name", ["events.jsonl", "steps.jsonl"])
def test_a_record_that_cannot_be_read_is_the_storages_fault(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    record = RunRecord(tmp_path)

    with pytest.raises(StorageError, match=name):
        record.started(step=1, job="job")
        record.rewind(1)


def test_a_line_that_was_torn_is_removed_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "sam')

    lines.append(path, {"step": 3})

    assert list(lines.read(path)) == [{"step": 1}, {"step": 3}]
    path.write_text('{"ste')
    lines.Appender(path).append({"step": 4})
    assert list(lines.read(path)) == [{"step": 4}]
    path.write_text('{"step": 4}\n{"step": 5}')
    assert list(lines.read(path)) == [{"step": 4}], "the next writer will remove the line without an end"


def test_a_line_that_a_disk_took_in_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(FileIO):
        def write(self, content: Any, /) -> int:
            return super().write(bytes(content)[:5])

    monkeypatch.setattr(lines, "FileIO", Full)
    with pytest.raises(StorageError, match="No space left"):
        lines.append(tmp_path / "events.jsonl", {"step": 1})


def test_a_number_that_json_lacks_is_refused_and_leaves_no_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines.append(path, {"step": 1})
    with pytest.raises(ValueError, match="JSON"):
        lines.append(path, {"step": 2, "loss": float("nan")})
    assert [*lines.read(path)] == [{"step": 1}]


def test_a_record_without_a_step_has_nothing_to_rewind(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.rewind(0)
    assert (record.last_step(), record.redone_steps) == (-1, 0)


def test_a_long_record_is_rewound_without_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, decoded = tmp_path / "steps.jsonl", 0
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(2000)) + '{"ste')

    def count(line: bytes) -> Any:
        nonlocal decoded
        decoded += 1
        return loads(line)

    loads = json.loads
    monkeypatch.setattr(json, "loads", count)
    lines.cut_off(path, lambda line: line["step"] >= 1990)

    assert decoded == 11
    assert [line["step"] for line in lines.read(path)] == list(range(1990))
    lines.cut_off(path, lambda line: True)
    assert path.read_text() == "" and lines.last(path) is None


def test_a_damaged_line_is_left_out_and_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path)
    for name in ("events.jsonl", "steps.jsonl", "ledger/job-w0.jsonl"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole.replace(b"\n", b'\n{"kind": "Fro{"x": \xff\n7\n', 1) + b"\0\0\n")

    record = RunRecord(tmp_path)
    assert record.last_step() == NUM_STEPS - 1
    summary = record.finish(metrics={}, model_step=NUM_STEPS, num_steps=NUM_STEPS, order=ORDER)

    assert [entry["first_step"] for entry in summary["generations"]] == [0, 3]
    assert {message.partition(": ")[2] for message in caplog.messages} == {"skipped 3 damaged lines"}


def test_a_torn_last_line_of_a_killed_leader_does_not_spoil_the_ledger(tmp_path: Path) -> None:
    commit_all(tmp_path)
    with (tmp_path / "ledger" / "job-w0.jsonl").open("a") as file:
        file.write('{"step": 8, "epo')
    assert audit(tmp_path, ORDER, 0, NUM_STEPS).lost == 0


def test_of_a_run_that_goes_on_whole_epochs_are_checked(tmp_path: Path) -> None:
    for step in range(NUM_STEPS - 1):
        commit_step(tmp_path, step)
    assert ledger_checker.check(tmp_path, SAMPLES, 1).repeated > 0, "a later epoch is more than was asked for"
    assert ledger_checker.check(tmp_path, SAMPLES, 1, goes_on=True).clean
    commit_step(tmp_path, 1, generation=2, drop=1)
    assert ledger_checker.check(tmp_path, SAMPLES, 1, goes_on=True).lost == 1


def test_a_cache_whose_use_cannot_be_recorded_is_no_broken_connection(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    log = CacheLog(tmp_path, "w0")
    with pytest.raises(StorageError, match=r"the run's record in .*w0.jsonl"):
        log.append(step=0, epoch=0, layout_generation=1, pipelines=1, counts={"hits": 1})
