"""Checkpoints are written while training goes on, and count once every worker's part is written."""

import errno
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

from pipetransformer.callbacks.callback import Callback
from pipetransformer.checkpoint import checkpointer as module
from pipetransformer.checkpoint import storage_work
from pipetransformer.checkpoint.best_model import best_location
from pipetransformer.checkpoint.checkpointer import Checkpointer
from pipetransformer.checkpoint.resume import in_order_of_checkpoint
from pipetransformer.device_copies import HostCopies
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import TCPStore
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer.errors import CallbackError, SpecError, StorageError
from pipetransformer.hooks import WorkerSignals
from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.models.off_device import bring_back, move_off
from pipetransformer.partition import Cut
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import CheckpointInfo, commit, latest, load_unit, save_unit
from pipetransformer.storage.store import MARKER
from pipetransformer.training.between_rounds import BetweenRounds
from pipetransformer.training.leader_events import CheckpointWritten
from pipetransformer.training.round import Rounds
from pipetransformer.training.vote import Vote
from pipetransformer_contract.messages import DurableCheckpoint, Member
from pipetransformer_contract.spec import Checkpoint
from tests.testkit.trainer.late_copies import Late
from tests.testkit.trainer.levels import level_job
from tests.testkit.trainer.numerics import ADAMW, make_spec
from tests.testkit.trainer.script import run
from tests.testkit.trainer.storing import Outage, alone, lone_layout, trained, until
from tests.testkit.trainer.watched import TRANSPORT, Clock, pair


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return load_job(make_spec(ADAMW, checkpoint={"location": str(tmp_path / "checkpoint"), "everySteps": 5}))


def location(job: Job) -> str:
    assert job.spec.checkpoint is not None
    return job.spec.checkpoint.location


class Gate:
    """Holds `save_unit` back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        write = save_unit

        def held(*arguments: Any, **named: Any) -> None:
            assert self.open.wait(30)
            write(*arguments, **named)

        monkeypatch.setattr("pipetransformer.checkpoint.storage_work.save_unit", held)


def test_what_is_written_is_the_state_at_its_beginning_and_not_what_training_made_of_it_since(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, checkpointer, state = Gate(monkeypatch), Checkpointer(job), trained(job, 5)
    name, parameter = next(iter(state.named_parameters(0)))
    before = parameter.detach().clone()
    checkpointer.want()

    checkpointer.begin(state, lone_layout(job), *alone())
    with torch.no_grad():
        parameter.add_(1)
    assert checkpointer.poll_writing()
    assert checkpointer.advance(1.0, leads=True) is None
    gate.open.set()
    until(lambda: not checkpointer.poll_writing())
    until(lambda: checkpointer.advance(0.0, leads=True))

    found = latest(location(job))
    assert found is not None and (found.step, found.layout_generation) == (5, 3)
    assert torch.equal(load_unit(location(job), found, "embedding")[name], before)


def written(leader: mock.Mock) -> list[CheckpointWritten]:
    """What `leader` was told of checkpoints."""
    events = [call.args[0] for call in leader.tell.call_args_list]
    return [event for event in events if isinstance(event, CheckpointWritten)]


def test_a_job_that_waits_for_a_level_finishes_its_checkpoint_and_begins_no_other(job: Job) -> None:
    """It makes no step, so its step stays one after which a checkpoint is due."""
    groups, barrier = alone()
    checkpointer, leader, state = Checkpointer(job), mock.Mock(), trained(job, 5)
    between = BetweenRounds(mock.Mock(checkpointer=checkpointer, barrier=barrier))
    member = mock.Mock(layout=lone_layout(job), groups=groups, leader=leader)
    between.save(state, member, Vote(), wanted=False)

    def vote() -> bool:
        between.continue_saving(state, member, Vote(writing=float(checkpointer.poll_writing())))
        return bool(written(leader))

    until(vote)
    for _ in range(3):
        until(lambda: not checkpointer.poll_writing())
        vote()

    assert len(written(leader)) == 1
    assert not checkpointer.poll_writing()


def test_copies_from_a_device_are_written_once_they_are_whole(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipetransformer.checkpoint.checkpointer.HostCopies", Late)
    checkpointer, state = Checkpointer(job), trained(job, 5)
    checkpointer.want()

    checkpointer.begin(state, lone_layout(job), *alone())
    until(lambda: not checkpointer.poll_writing())
    until(lambda: checkpointer.advance(0.0, leads=True))

    found = latest(location(job))
    assert found is not None
    name, parameter = next(iter(state.named_parameters(0)))
    assert parameter.any() and torch.equal(load_unit(location(job), found, "embedding")[name], parameter)


def test_a_unit_that_is_off_the_device_is_written_without_a_copy(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that then comes back and trains changes other memory."""
    gate, checkpointer, state = Gate(monkeypatch), Checkpointer(job), trained(job, 5)
    name, parameter = next(iter(state.named_parameters(0)))
    before, device = parameter.detach().clone(), torch.device("cpu")
    move_off(state.units[0], device)
    copied: list[Tensor] = []

    class Noting(HostCopies):
        def copy(self, tensor: Tensor) -> Tensor:
            copied.append(tensor)
            return super().copy(tensor)

    monkeypatch.setattr("pipetransformer.checkpoint.checkpointer.HostCopies", Noting)
    checkpointer.want()

    checkpointer.begin(state, lone_layout(job), *alone())
    at_home = {parameter.data_ptr() for parameter in state.units[0].parameters()}
    bring_back(state.units[0], device)
    with torch.no_grad():
        parameter.add_(1)
    gate.open.set()
    until(lambda: not checkpointer.poll_writing())
    until(lambda: checkpointer.advance(0.0, leads=True))

    assert copied and at_home.isdisjoint(tensor.data_ptr() for tensor in copied)
    found = latest(location(job))
    assert found is not None
    assert torch.equal(load_unit(location(job), found, "embedding")[name], before)


class AtOnce:
    """Does in the caller's thread what is submitted, so that all of it is done when the caller goes on."""

    def __init__(self, **_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future


def test_a_checkpoint_counts_only_once_nobody_writes_any_more(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ThreadPoolExecutor", AtOnce)
    checkpointer = Checkpointer(job)
    checkpointer.want()
    checkpointer.begin(trained(job, 5), lone_layout(job), *alone())
    assert not checkpointer.poll_writing()

    assert checkpointer.advance(1.0, leads=True) is None, "another worker writes"
    assert latest(location(job)) is None
    made = checkpointer.advance(0.0, leads=True)
    assert made is not None and made.step == 5
    assert latest(location(job)) is not None


def test_a_last_checkpoint_counts_only_once_all_have_passed_the_barrier_behind_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ThreadPoolExecutor", AtOnce)
    counted: list[bool] = []

    class Watched:
        """A barrier at which others still write until this worker has done its own part."""

        def pass_after(self, work: Callable[[], Any] | None, groups: object) -> Any:
            if len(counted) < 2:  # the copies, and the parts
                counted.append(latest(location(job)) is not None)
            return None if work is None else work()

    checkpointer, barrier = Checkpointer(job), cast(Barrier, Watched())
    made = checkpointer.save_now(trained(job, 5), lone_layout(job), alone()[0], barrier)

    assert made is not None and made.step == 5
    assert counted == [False, False]
    assert latest(location(job)) is not None


def test_what_is_asked_for_meanwhile_is_written_afterwards_as_training_stands_then(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, checkpointer, layout = Gate(monkeypatch), Checkpointer(job), lone_layout(job)
    checkpointer.want()
    checkpointer.begin(trained(job, 5), layout, *alone())
    checkpointer.want()
    checkpointer.begin(trained(job, 6), layout, *alone())
    gate.open.set()
    until(lambda: not checkpointer.poll_writing())
    until(lambda: checkpointer.advance(0.0, leads=True))

    checkpointer.begin(trained(job, 7), layout, *alone())
    until(lambda: not checkpointer.poll_writing())
    until(lambda: checkpointer.advance(0.0, leads=True))

    found = latest(location(job))
    assert found is not None and found.step == 7


def test_one_that_a_regroup_overtakes_never_counts(job: Job) -> None:
    checkpointer = Checkpointer(job)
    checkpointer.want()
    checkpointer.begin(trained(job, 5), lone_layout(job), *alone())

    checkpointer.cancel()

    assert not checkpointer.poll_writing()
    assert checkpointer.advance(0.0, leads=True) is None
    assert latest(location(job)) is None


def test_one_that_was_given_up_is_not_written_to_its_end_before_the_next(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, checkpointer = Gate(monkeypatch), Checkpointer(job)
    for step in (5, 6, 7):
        checkpointer.want()
        checkpointer.begin(trained(job, step), lone_layout(job), *alone())
        checkpointer.cancel()

    gate.open.set()
    checkpointer.want()
    checkpointer.begin(trained(job, 8), lone_layout(job), *alone())
    until(lambda: not checkpointer.poll_writing())

    *given_up, files = [len(list(folder.iterdir())) for folder in sorted(Path(location(job)).iterdir())]
    assert files == job.num_layers + 2
    assert sum(given_up) <= 1, "the unit that was being written"


def test_what_a_run_was_writing_when_it_ended_is_not_written_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, written, write = Gate(monkeypatch), threading.Event(), storage_work.Write.run

    def held(part: storage_work.Write) -> None:
        try:
            write(part)
        finally:
            written.set()

    class Failing(Callback):
        def on_step(self, line: Mapping[str, Any]) -> None:
            if line["step"] == 1:
                raise ValueError("full disk")

    monkeypatch.setattr(storage_work.Write, "run", held)
    with pytest.raises(CallbackError):
        run(
            tmp_path, checkpoint=Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=1), callbacks=[Failing()]
        )

    gate.open.set()
    assert written.wait(30)
    assert len(list((tmp_path / "checkpoint").glob("*/*"))) <= 1, "the unit that was being written"


def make_durable(job: Job, step: int) -> None:
    checkpointer = Checkpointer(job)
    checkpointer.want()
    checkpointer.begin(trained(job, step), lone_layout(job), *alone())
    until(lambda: not checkpointer.poll_writing())
    until(lambda: checkpointer.advance(0.0, leads=True))


def test_all_load_the_checkpoint_that_was_planned_and_not_one_that_became_durable_meanwhile(job: Job) -> None:
    make_durable(job, 5)
    planned = Checkpointer(job).durable()
    assert planned is not None
    late = Checkpointer(job)
    make_durable(job, 10)

    assert late.load_control(planned.name).step == planned.step == 5
    assert late.load_unit(0).keys() == trained(job, 5).unit_tensors(0, with_moments=True).keys()


def test_a_planned_checkpoint_that_newer_ones_pushed_out_meanwhile_is_planned_anew(job: Job) -> None:
    make_durable(job, 5)
    checkpointer = Checkpointer(job)
    planned = checkpointer.durable()
    assert planned is not None
    checkpointer.load_control(planned.name)
    for step in (10, 15):
        make_durable(job, step)

    with pytest.raises(LookupError, match="no longer holds step-000000000005-g3"):
        checkpointer.load_unit(0)
    with pytest.raises(LookupError, match="no longer holds step-000000000005-g3"):
        checkpointer.load_control(planned.name)


def test_a_planned_checkpoint_that_this_worker_sees_late_is_waited_for(job: Job, tmp_path: Path) -> None:
    """The leader has seen the marker already. A client of NFS may keep for a minute that there was none."""
    make_durable(job, 5)
    planned = Checkpointer(job).durable()
    assert planned is not None
    marker = Path(location(job)) / planned.name / MARKER
    late = marker.rename(tmp_path / "late")
    threading.Timer(0.2, late.rename, args=(marker,)).start()

    assert Checkpointer(job).load_control(planned.name).step == 5


def test_what_a_worker_knows_of_checkpoints_needs_no_storage(job: Job, tmp_path: Path) -> None:
    make_durable(job, 5)
    checkpointer, control = Checkpointer(job), Control(step=5)
    assert checkpointer.known(control) is None
    planned = checkpointer.durable()
    assert planned is not None
    checkpointer.load_control(planned.name)
    (tmp_path / "checkpoint").rename(tmp_path / "unreachable")

    known = checkpointer.known(control)
    assert known is not None and (known.step, known.layout_generation) == (5, 3)


def test_generations_are_numbered_as_the_operator_does_and_those_of_earlier_jobs_are_none() -> None:
    info = CheckpointInfo(step=4, boundary=1, layout_generation=7, num_layers=2, min_stages=2, num_shards=3)
    expected = DurableCheckpoint(step=4, boundary=1, min_stages=2, num_shards=3, layout_generation=2)
    assert module.describe(info, 5) == expected
    assert module.describe(info, 9).layout_generation == 0


def test_the_best_model_counts_only_for_a_job_that_keeps_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    best = CheckpointInfo(step=4, boundary=0, layout_generation=1, num_layers=0)
    for unit in ("embedding", "head"):
        save_unit(best_location(folder), best, unit, {})
    commit(best_location(folder), best)

    def kept(*, keep_best: bool) -> int:
        evaluation = {"everySteps": 1, "keepBest": keep_best}
        spec = make_spec(ADAMW, checkpoint={"location": folder}, evaluation=evaluation)
        return Checkpointer(load_job(spec)).kept_step()

    assert kept(keep_best=True) == 4 and kept(keep_best=False) == 0


def test_a_new_job_numbers_its_generations_above_those_that_kept_a_level(tmp_path: Path) -> None:
    checkpointer = Checkpointer(level_job("own-vit", tmp_path))
    assert checkpointer.newest_generation() == 0
    info = CheckpointInfo(step=4, boundary=0, layout_generation=6, num_layers=4)
    save_unit(str(tmp_path / "checkpoints" / "levels" / "0"), info, "head", {})
    assert checkpointer.newest_generation() == 6


def test_only_a_job_that_starts_with_more_pipelines_than_its_checkpoints_data_have_shards_is_refused(job: Job) -> None:
    make_durable(load_job(job.spec, num_shards=4), 5)
    may_grow = job.spec.model_copy(update={"num_shards": 5, "workers": 16})
    assert in_order_of_checkpoint(may_grow) == (may_grow.model_copy(update={"num_shards": 4}), 4)
    wider = may_grow.model_copy(update={"workers": 20})

    with pytest.raises(
        SpecError, match=r"workers: 20 workers start as 5 pipelines, .* step-0{11}5-g3-[0-9a-f]{8} .* set .* at most 16"
    ):
        in_order_of_checkpoint(wider)


def test_a_checkpoint_in_another_order_of_the_data_that_came_meanwhile_is_refused(job: Job) -> None:
    make_durable(job, 5)
    other = load_job(job.spec, num_shards=2)

    with pytest.raises(SpecError, match=r"numShards was 100 and not 2"):
        Checkpointer(other).durable()


def test_a_checkpoint_of_a_model_with_other_heads_is_refused_for_no_shape_shows_them(job: Job) -> None:
    make_durable(job, 5)
    heads = job.spec.model.num_heads
    other = load_job(job.spec.model_copy(update={"model": job.spec.model.model_copy(update={"num_heads": 2 * heads})}))

    with pytest.raises(SpecError, match=f"numHeads was {heads} and not {2 * heads}"):
        Checkpointer(other).durable()


def test_those_who_copy_nothing_wait_for_those_who_do_however_long_that_takes(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TRANSPORT.timeout)
    groups, limit = pair(store), 0.2
    clock, watchdog = Clock(monkeypatch, limit), Watchdog(first_seconds=limit)
    watchdog.start()
    members = [Member(name=f"w{rank}", uid=f"u{rank}", address="127.0.0.1:1") for rank in range(2)]
    generation = lone_layout(job).generation.model_copy(update={"members": members})
    spans = [range(job.num_layers + 2)]

    class SlowToCopy(WorkerState):
        """Takes most of the limit to say what of a unit is to be copied."""

        def unit_tensors(self, index: int, *, with_moments: bool) -> dict[str, Tensor]:
            clock.go_on(0.9 * limit)
            return super().unit_tensors(index, with_moments=with_moments)

    def save(rank: int) -> None:
        layout = StageLayout(generation, rank, [(0, 0), (1, 0)], Cut(spans, 16))
        state = SlowToCopy(job.num_layers, control=Control(step=5), units=job.build_units(spans[0]))
        Checkpointer(job).save_now(state, layout, groups[rank], Barrier(watchdog if rank else Watchdog()))

    other = threading.Thread(target=save, args=(0,))
    other.start()
    save(1)
    other.join(30)
    watchdog.stop()
    for each in groups:
        each.drop()
    found = latest(location(job))
    assert found is not None and found.step == 5


def test_a_part_that_cannot_be_written_fails_the_worker_and_names_the_field(job: Job, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file where the folder should be")
    checkpointer = Checkpointer(job)
    checkpointer.want()
    checkpointer.begin(trained(job, 5), lone_layout(job), *alone())

    with pytest.raises(StorageError, match=r"spec\.checkpoint\.location"):
        until(lambda: not checkpointer.poll_writing())


@pytest.mark.parametrize("name", ["save_unit", "commit"])
@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("the storage does not answer"),
        OSError(errno.ENOSPC, "no space left"),
        PermissionError("the token has expired"),
    ],
    ids=["away", "full", "refuses"],
)
def test_training_goes_on_while_the_storage_fails_and_the_checkpoint_is_written_once_it_is_back(
    job: Job, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    outage = Outage(monkeypatch, name, error)
    checkpointer, layout = Checkpointer(job), lone_layout(job)
    checkpointer.want()
    checkpointer.begin(trained(job, 5), layout, *alone())

    def next_round() -> Any:
        return checkpointer.advance(float(checkpointer.poll_writing()), leads=True)

    def several_attempts() -> bool:
        assert next_round() is None
        return outage.attempts >= 3

    until(several_attempts)
    assert str(error) in checkpointer.why_unsaved and "spec.checkpoint.location" in checkpointer.why_unsaved
    assert latest(location(job)) is None
    outage.back.set()
    until(next_round)

    found = latest(location(job))
    assert found is not None and found.step == 5
    assert checkpointer.why_unsaved == ""


def test_a_checkpoint_that_waited_for_the_storage_is_followed_by_a_newer_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(monkeypatch, "save_unit", TimeoutError("away"))
    checkpointer, layout = Checkpointer(job), lone_layout(job)
    for step in (5, 10, 15):
        checkpointer.want()
        checkpointer.begin(trained(job, step), layout, *alone())
        assert checkpointer.advance(float(checkpointer.poll_writing()), leads=True) is None
    outage.back.set()
    for step in (5, 16):
        until(lambda: checkpointer.advance(float(checkpointer.poll_writing()), leads=True))
        found = latest(location(job))
        assert found is not None and found.step == step
        checkpointer.begin(trained(job, 16), layout, *alone())


def test_a_regroup_drops_what_waits_for_the_storage(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage(monkeypatch, "commit", TimeoutError("away"))
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 600.0)
    checkpointer, layout = Checkpointer(job), lone_layout(job)
    checkpointer.want()
    checkpointer.begin(trained(job, 5), layout, *alone())

    def waits() -> bool:
        checkpointer.advance(float(checkpointer.poll_writing()), leads=True)
        return bool(checkpointer.why_unsaved)

    until(waits)
    checkpointer.cancel()
    assert checkpointer.why_unsaved == ""
    outage.back.set()
    checkpointer.want()
    checkpointer.begin(trained(job, 6), layout, *alone())
    until(lambda: checkpointer.advance(float(checkpointer.poll_writing()), leads=True))

    found = latest(location(job))
    assert found is not None and found.step == 6


def test_an_outage_says_nothing_of_what_a_checkpoint_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, clock, job = checkpointing(tmp_path)
    outage, layout = Outage(monkeypatch, "save_unit", TimeoutError("away")), lone_layout(job)
    checkpointer.want()
    checkpointer.begin(trained(job, 5), layout, *alone())
    until(lambda: checkpointer.poll_writing() and checkpointer.why_unsaved)
    clock.now += 900
    outage.back.set()
    until(lambda: checkpointer.advance(float(checkpointer.poll_writing()), leads=True))

    assert checkpointer.overdue(8), "what is durable is of 900 s ago"


def test_a_run_trains_through_an_outage_and_leaves_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipetransformer.callbacks.callback._BACKLOG", 0)  # steps are left, which see what failed
    outage = Outage(monkeypatch, "save_unit", TimeoutError("away"))
    reached: list[int] = []
    begun, make = list[storage_work.StorageWork](), storage_work.StorageWork.__init__

    def note(work: storage_work.StorageWork, *arguments: Any) -> None:
        make(work, *arguments)
        begun.append(work)

    class Repairing(Callback):
        def on_step(self, line: Mapping[str, Any]) -> None:
            reached.append(line["step"])
            if line["step"] == 4:
                until(lambda: outage.attempts and begun[-1].done)
                outage.back.set()

    monkeypatch.setattr(storage_work.StorageWork, "__init__", note)

    folder = str(tmp_path / "checkpoint")
    run(tmp_path, checkpoint=Checkpoint(location=folder, every_steps=1), callbacks=[Repairing()])

    found = latest(folder)
    assert found is not None and found.step == len(reached) == 8


def test_a_worker_that_ends_its_job_does_not_wait_for_a_storage_that_fails(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    Outage(monkeypatch, "save_unit", TimeoutError("away"))
    checkpointer, layout, (groups, barrier) = Checkpointer(job), lone_layout(job), alone()
    checkpointer.want()
    checkpointer.begin(trained(job, 5), layout, groups, barrier)

    with pytest.raises(StorageError, match="away"):
        checkpointer.complete(layout, groups, barrier)


def test_the_last_checkpoint_does_not_wait_for_the_marker_of_an_earlier_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(monkeypatch, "commit", TimeoutError("away"))
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 600.0)
    checkpointer, layout, (groups, barrier) = Checkpointer(job), lone_layout(job), alone()
    checkpointer.want()
    checkpointer.begin(trained(job, 5), layout, groups, barrier)

    def waits() -> bool:
        checkpointer.advance(float(checkpointer.poll_writing()), leads=True)
        return bool(checkpointer.why_unsaved)

    until(waits)
    outage.back.set()
    checkpointer.want()
    checkpointer.begin(trained(job, 6), layout, groups, barrier)

    durable = checkpointer.complete(layout, groups, barrier)
    assert durable is not None and durable.step == 6


class Stopping(WorkerSignals):
    """Is told to stop, and may have no more time."""

    late = False

    def stop_requested(self) -> bool:
        return True

    def out_of_time(self) -> bool:
        return self.late


def test_a_worker_that_must_leave_tries_to_save_until_its_time_is_over(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(monkeypatch, "save_unit", FileNotFoundError("gone"))
    signals, (groups, barrier) = Stopping(), alone()
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    checkpointer, layout = Checkpointer(job, signals), lone_layout(job)
    checkpointer.want()
    checkpointer.begin(trained(job, 5), layout, groups, barrier)
    until(lambda: checkpointer.poll_writing() and checkpointer.why_unsaved)
    with ThreadPoolExecutor(1) as thread:
        saved = thread.submit(checkpointer.save_now, trained(job, 6), layout, groups, barrier)
        until(lambda: outage.attempts >= 3)
        assert not saved.done()
        signals.late = True
        with pytest.raises(StorageError, match="gone"):
            saved.result(30)


@pytest.mark.parametrize(
    ("pause", "writing", "seconds"),
    [(0.001, 0.1, 60.0), (2.0, 3.0, 200.0), (0.5, 90.0, 900.0), (60.0, 100.0, 1800.0)],
)
def test_what_a_checkpoint_costs_says_how_often_one_is_made(pause: float, writing: float, seconds: float) -> None:
    assert module.interval_seconds(pause, writing) == pytest.approx(seconds)


class Seconds:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def checkpointing(tmp_path: Path, **checkpoint: Any) -> tuple[Checkpointer, Seconds, Job]:
    clock = Seconds()
    job = load_job(make_spec(ADAMW, checkpoint={"location": str(tmp_path / "checkpoint")} | checkpoint))
    return Checkpointer(job, clock=clock), clock, job


def test_where_the_spec_does_not_say_how_often_the_clock_does_by_what_the_newest_has_cost(tmp_path: Path) -> None:
    checkpointer, clock, job = checkpointing(tmp_path)
    clock.now = 59.0
    assert not checkpointer.overdue(8)
    clock.now = 60.0
    assert checkpointer.overdue(8) and not checkpointer.due(7)

    checkpointer.want()

    def copy_for_3_seconds(*_: object, **__: object) -> dict[str, Tensor]:
        clock.now = 63.0
        return {}

    with mock.patch.object(WorkerState, "unit_tensors", side_effect=copy_for_3_seconds):
        checkpointer.begin(trained(job, 7), lone_layout(job), *alone())
    assert not checkpointer.overdue(8), "one is being written"
    until(lambda: not checkpointer.poll_writing())
    checkpointer.advance(0.0, leads=True)
    clock.now = 359.0
    assert not checkpointer.overdue(8)
    clock.now = 360.0
    assert checkpointer.overdue(8), "it stood still for 3 s: a hundredth of 300"
    assert not checkpointer.overdue(7), "the job waits, and has made no step since"


def test_a_durable_checkpoint_says_what_it_cost(tmp_path: Path) -> None:
    checkpointer, clock, job = checkpointing(tmp_path)
    clock.now = 100.0

    def copy_for_3_seconds(*_: object, **__: object) -> dict[str, Tensor]:
        clock.now = 103.0
        return {}

    checkpointer.want()
    with mock.patch.object(WorkerState, "unit_tensors", side_effect=copy_for_3_seconds):
        checkpointer.begin(trained(job, 7), lone_layout(job), *alone())
    until(lambda: not checkpointer.poll_writing())
    clock.now = 110.0
    durable: DurableCheckpoint | None = None

    def advance() -> bool:
        nonlocal durable
        durable = checkpointer.advance(0.0, leads=True)
        return durable is not None

    until(advance)
    assert durable is not None
    assert (durable.step, durable.pause_seconds, durable.write_seconds) == (7, 3.0, 10.0)
    known = checkpointer.known(trained(job, 7).control)
    assert known is not None and known.pause_seconds is None, "a regroup does not know the cost, the operator does"


def test_where_the_spec_says_how_often_no_clock_does(tmp_path: Path) -> None:
    checkpointer, clock, _ = checkpointing(tmp_path, everySteps=5)
    clock.now = 1e6
    assert not checkpointer.overdue(8)
    assert checkpointer.due(10) and not checkpointer.due(11)


class Asking(WorkerSignals):
    """Asks for a checkpoint under a token."""

    token = ""

    def checkpoint_request(self) -> str:
        return self.token


def test_a_checkpoint_that_is_asked_for_is_due_until_one_is_begun_for_it(tmp_path: Path) -> None:
    job = load_job(make_spec(ADAMW, checkpoint={"location": str(tmp_path / "checkpoint"), "everySteps": 1000}))
    signals = Asking()
    checkpointer, layout = Checkpointer(job, signals), lone_layout(job)

    def next_durable() -> DurableCheckpoint:
        found: list[DurableCheckpoint] = []

        def advance() -> bool:
            found.extend(filter(None, [checkpointer.advance(float(checkpointer.poll_writing()), leads=True)]))
            return bool(found)

        until(advance)
        return found[0]

    checkpointer.want()
    checkpointer.begin(trained(job, 5), layout, *alone())
    signals.token = "one"
    assert checkpointer.overdue(8), "the one that is being written was begun before"
    checkpointer.want()
    assert next_durable().request == ""
    checkpointer.begin(trained(job, 6), layout, *alone())
    assert not checkpointer.overdue(8)
    durable = next_durable()
    assert (durable.step, durable.request) == (6, "one")
    assert not checkpointer.overdue(8)
    checkpointer.cancel()
    assert checkpointer.overdue(8), "in the next generation, until the operator knows"
    signals.token = ""
    assert not checkpointer.overdue(8)


def test_a_job_that_waits_for_a_level_writes_a_checkpoint_that_is_asked_for_once(job: Job) -> None:
    groups, barrier = alone()
    signals, leader, state = Asking(), mock.Mock(), trained(job, 5)
    checkpointer = Checkpointer(job, signals)
    kit = mock.Mock(checkpointer=checkpointer, barrier=barrier, hooks=signals)
    kit.watcher.found.return_value = None
    member = mock.Mock(layout=lone_layout(job), groups=groups, leader=leader)
    rounds, between = Rounds(kit), BetweenRounds(kit)

    def vote() -> bool:
        between.continue_saving(state, member, rounds.agree(state.control, member, waits=True))
        return bool(written(leader))

    assert not vote() and not checkpointer.poll_writing()
    signals.token = "one"
    until(vote)
    vote()

    (event,) = written(leader)
    assert event.checkpoint.request == "one" and not checkpointer.poll_writing()


def test_a_job_without_checkpoints_writes_none_that_is_asked_for() -> None:
    signals = Asking()
    signals.token = "one"
    assert not Checkpointer(load_job(make_spec(ADAMW)), signals).overdue(8)


def test_a_job_that_does_not_say_how_often_makes_checkpoints_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "interval_seconds", lambda *_: 0.0)
    made = []
    monkeypatch.setattr(module, "commit", lambda location, info, keep: made.append(info.step))
    run(tmp_path, checkpoint=Checkpoint(location=str(tmp_path / "checkpoint")))
    assert made and 0 < made[0] < 8
