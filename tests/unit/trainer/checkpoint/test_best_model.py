"""The best model is kept durably, and training waits while the storage does not take it."""

import datetime
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipetransformer.checkpoint import weights_saving
from pipetransformer.checkpoint.best_model import best_location, save_best
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import GenerationGroups, TCPStore, Transport
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer.errors import StorageError
from pipetransformer.hooks import WorkerSignals
from pipetransformer.job.job import Job
from pipetransformer.job.load import load_job
from pipetransformer.partition import Cut
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import commit, latest
from pipetransformer.training.evaluation import evaluate, evaluation_due
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from tests.testkit.trainer.numerics import ADAMW, make_spec
from tests.testkit.trainer.ranks import run_ranks
from tests.testkit.trainer.storing import Outage, alone, lone_layout, trained, until


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return load_job(make_spec(ADAMW, checkpoint={"location": str(tmp_path / "checkpoint"), "everySteps": 5}))


def pair_layout(job: Job, rank: int) -> StageLayout:
    """Two pipelines of one worker each."""
    members = [Member(name=f"w{rank}", uid=f"u{rank}", address="127.0.0.1:1") for rank in range(2)]
    generation = Generation(
        job_uid="job", layout_generation=1, stages=1, pipelines=2, members=members, leader="w0", nonce="n",
        reason=ResizeReason.START,
    )  # fmt: skip
    return StageLayout(generation, rank, [(0, 0), (1, 0)], Cut([range(job.num_layers + 2)], 16))


def meet(group: dist.ProcessGroup, port: int) -> GenerationGroups:
    """Groups of the ranks of `group`, which meet in the store at `port`."""
    timeout = datetime.timedelta(seconds=60)
    groups, store = GenerationGroups(), TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    groups.meet(store, group.rank(), group.size(), 0, Transport("127.0.0.1", timeout))
    return groups


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def save_as_best(group: dist.ProcessGroup, port: int, location: str) -> bool:
    """Save by two ranks, of which the first leads; on the leader, whether the other had returned before the marker."""
    job = load_job(make_spec(ADAMW, checkpoint={"location": location}))
    layout = pair_layout(job, group.rank())
    other_returned = Path(location).with_name("returned")
    early = []

    def commit_late(*arguments: Any, **named: Any) -> None:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and not other_returned.exists():
            time.sleep(0.01)
        early.append(other_returned.exists())
        commit(*arguments, **named)

    with mock.patch.object(weights_saving, "commit", commit_late):
        save_best(job, trained(job, 5), layout, meet(group, port), Barrier(Watchdog()), WorkerSignals())
    if group.rank() == 1:
        other_returned.touch()
    return any(early)


@pytest.mark.timeout(120)
def test_nobody_notes_a_best_model_before_it_is_durable(tmp_path: Path, store: TCPStore) -> None:
    assert run_ranks(2, save_as_best, store.port, str(tmp_path / "checkpoint")) == [False, False]
    assert latest(best_location(str(tmp_path / "checkpoint"))) is not None


@pytest.fixture
def evaluated(tmp_path: Path) -> tuple[Job, WorkerState, Callable[[], bool]]:
    """A job that keeps its best model, its state after step 5, and its evaluation, which finds a better one."""
    checkpoint = {"location": str(tmp_path / "checkpoint"), "everySteps": 100}
    job = load_job(make_spec(ADAMW, checkpoint=checkpoint, evaluation={"everySteps": 5, "keepBest": True}))
    state, (groups, barrier) = trained(job, 5), alone()
    state.control.best, state.control.best_step, state.control.kept_step = {"accuracy": 0.1}, 3, 3
    member = mock.Mock(layout=lone_layout(job), groups=groups, world=groups.world, leader=None)
    member.runner.evaluate.return_value = torch.ones(2, 2)
    member.runner.lengths_of_parts.return_value = [None]
    return job, state, lambda: evaluate(job, state, member, Watchdog(), barrier, WorkerSignals())


def test_a_best_model_that_may_have_been_replaced_counts_no_more(
    evaluated: tuple[Job, WorkerState, Callable[[], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, state, evaluate_once = evaluated

    def replace(*_: object) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr("pipetransformer.training.evaluation.save_best", replace)
    with pytest.raises(RuntimeError):
        evaluate_once()

    assert evaluation_due(job, state.control), "it is done again"
    assert state.control.is_better({"accuracy": 0.0}, job.spec.evaluation), "and is the best, by however little"


def test_an_evaluation_whose_model_was_not_kept_is_done_again(
    evaluated: tuple[Job, WorkerState, Callable[[], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, state, evaluate_once = evaluated
    monkeypatch.setattr("pipetransformer.training.evaluation.save_best", lambda *_: False)

    assert not evaluate_once()
    assert evaluation_due(job, state.control)


@pytest.mark.parametrize("name", ["save_unit", "commit"])
def test_training_waits_for_a_storage_that_does_not_take_the_best_model(
    job: Job, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    outage = Outage(monkeypatch, name, TimeoutError("away"), weights_saving)
    monkeypatch.setattr(weights_saving, "AGAIN_SECONDS", 0.01)
    groups, barrier = alone()
    with ThreadPoolExecutor(1) as thread:
        saved = thread.submit(save_best, job, trained(job, 5), lone_layout(job), groups, barrier, WorkerSignals())
        until(lambda: outage.attempts >= 3)
        assert not saved.done()
        outage.back.set()

        assert saved.result(30)
    assert job.spec.checkpoint is not None
    found = latest(best_location(job.spec.checkpoint.location))
    assert found is not None and found.step == 5


@pytest.mark.parametrize("told_to_stop", [False, True])
def test_no_more_is_written_once_the_members_wait_no_longer(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, told_to_stop: bool
) -> None:
    """What waits to be written would hold the weights of a state that is over, for as long as the storage fails."""
    begun, away = threading.Semaphore(0), threading.Event()

    def hang(*_: object) -> None:
        begun.release()
        assert away.wait(30)
        raise TimeoutError("away")

    monkeypatch.setattr(weights_saving, "save_unit", hang)
    signals = mock.Mock(stop_requested=lambda: told_to_stop)
    saving = weights_saving.WeightsSaving(str(tmp_path / "best"), trained(job, 5), lone_layout(job), signals)
    assert job.num_layers + 2 > weights_saving._FILES_AT_ONCE
    for _ in range(weights_saving._FILES_AT_ONCE):
        assert begun.acquire(timeout=30)

    def sum_barrier(_: object, numbers: Callable[[bool], Sequence[float]]) -> Sequence[float]:
        if told_to_stop:
            return numbers(False)
        raise RuntimeError("connection closed by peer")

    if told_to_stop:
        assert not saving.wait(sum_barrier)
    else:
        with pytest.raises(RuntimeError):
            saving.wait(sum_barrier)
    away.set()
    saving._threads.shutdown()
    assert not begun.acquire(blocking=False)


def save_in_an_outage(group: dist.ProcessGroup, port: int, location: str) -> bool:
    """The first worker writes to a storage that is away, and the second is told to stop once it has waited."""
    job = load_job(make_spec(ADAMW, checkpoint={"location": location}))
    layout = pair_layout(job, group.rank())
    told = itertools.chain([False], itertools.repeat(group.rank() == 1))
    stop = mock.Mock(stop_requested=lambda: next(told))
    with (
        mock.patch.object(weights_saving, "save_unit", side_effect=TimeoutError("away")),
        mock.patch.object(weights_saving, "AGAIN_SECONDS", 0.01),
    ):
        return save_best(job, trained(job, 5), layout, meet(group, port), Barrier(Watchdog()), stop)


@pytest.mark.timeout(120)
def test_no_worker_waits_for_the_storage_once_one_is_told_to_stop(tmp_path: Path, store: TCPStore) -> None:
    assert run_ranks(2, save_in_an_outage, store.port, str(tmp_path / "checkpoint")) == [False, False]
    assert latest(best_location(str(tmp_path / "checkpoint"))) is None


def test_a_location_that_stays_wrong_fails_the_best_model(job: Job, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file where the folder should be")

    with pytest.raises(StorageError, match=r"spec\.checkpoint\.location"):
        save_best(job, trained(job, 5), lone_layout(job), *alone(), WorkerSignals())
