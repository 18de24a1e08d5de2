"""Who is told to stop in an evaluation, and peers that hang there: all agree, about once a second, whether to go on."""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pipetransformer import (
    Checkpoint,
    Evaluation,
    Pipeline,
)
from pipetransformer.data import MicroBatch
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import TCPStore
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer.job.load import load_job
from pipetransformer.partition import Cut
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.storage import latest
from pipetransformer.training.evaluation import evaluate
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from tests.testkit.trainer.numerics import ADAMW, make_spec
from tests.testkit.trainer.script import REHEARSED, events, positives, run
from tests.testkit.trainer.watched import TRANSPORT, pair

pytestmark = pytest.mark.timeout(120)


def test_a_worker_told_to_stop_saves_first_and_the_resumed_run_evaluates(tmp_path: Path) -> None:
    micro_batches = iter(range(100))

    def metric(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if next(micro_batches) == 2 * 2:  # one before the first step, then two after each
            os.kill(os.getpid(), signal.SIGTERM)  # seen in the round that ends with step 3
        return positives(output, target, weight)

    spec: dict[str, Any] = {
        "metrics": [metric],
        "pipeline": Pipeline(stages=1, micro_batch_size=REHEARSED),
        "evaluation": Evaluation(every_steps=1),
        "checkpoint": Checkpoint(location=str(tmp_path / "checkpoint")),
    }
    with pytest.raises(SystemExit):
        run(tmp_path, **spec)
    left = latest(str(tmp_path / "checkpoint"))
    assert left is not None and (left.step, left.state["evaluatedStep"]) == (3, 2)

    run(tmp_path, **spec)

    assert [event["step"] for event in events(tmp_path, "Evaluated")] == list(range(1, 9))


def test_who_is_told_to_stop_in_an_evaluation_leaves_it_for_a_checkpoint(tmp_path: Path) -> None:
    micro_batches, per_evaluation = 0, 20
    told_at = 1 + 2 * per_evaluation + 1  # one before the first step, all of two evaluations, the first of the third

    def metric(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal micro_batches
        micro_batches += 1
        if micro_batches == told_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return positives(output, target, weight)

    spec: dict[str, Any] = {
        "metrics": [metric],
        "pipeline": Pipeline(stages=1, micro_batch_size=1),
        "evaluation": Evaluation(every_steps=1),
        "checkpoint": Checkpoint(location=str(tmp_path / "checkpoint")),
    }
    with pytest.raises(SystemExit):
        run(tmp_path, **spec)
    assert micro_batches == told_at + 1, "two go through the pipeline together"
    left = latest(str(tmp_path / "checkpoint"))
    assert left is not None and (left.step, left.state["evaluatedStep"]) == (3, 2)

    run(tmp_path, **spec)

    assert [event["step"] for event in events(tmp_path, "Evaluated")] == list(range(1, 9))


def test_an_evaluation_that_was_put_off_does_not_count_as_pause(tmp_path: Path) -> None:
    called_at: list[float] = []

    def metric(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        called_at.append(time.time())
        if began_at is None and len(called_at) == 2:  # after the one before the first step
            os.kill(os.getpid(), signal.SIGTERM)
        if began_at is not None and len(called_at) == 2:  # at least as long as it took to come here
            threading.Event().wait(time.time() - began_at)
        return positives(output, target, weight)

    spec: dict[str, Any] = {
        "metrics": [metric],
        "pipeline": Pipeline(stages=1, micro_batch_size=1),
        "evaluation": Evaluation(every_steps=2),
        "checkpoint": Checkpoint(location=str(tmp_path / "checkpoint")),
    }
    began_at = None
    with pytest.raises(SystemExit):
        run(tmp_path, **spec)
    called_at.clear()
    began_at = time.time()
    run(tmp_path, **spec)

    committed = events(tmp_path, "GenerationCommitted")[-1]
    assert committed["firstStep"] == 2
    evaluated_seconds = called_at[2] - called_at[1]
    most = committed["time"] - began_at - evaluated_seconds
    assert committed["pauseSeconds"] < most
    assert sum(committed["phases"].values()) < most


class Parts:
    """Stands in for the runner of one of two pipelines, which have 9 and 3 parts to evaluate.

    Args:
        reached: called at each part.
        short: of the 9 so many have shorter samples than the others.
    """

    spec = mock.Mock(device=torch.device("cpu"))

    def __init__(self, reached: Callable[[int], None] = lambda part: None, short: int = 0) -> None:
        self.reached = reached
        self.short = short
        self.done = 0

    def lengths_of_parts(self, micro_batches: Sequence[MicroBatch]) -> list[int | None]:
        if 0 in micro_batches[0].sample_ids:
            return [32 if part < self.short else 2048 for part in range(9)]
        return [2048] * 3

    def evaluate(self, own: Sequence[MicroBatch], *_: object, name: str, may_continue: Callable[[], bool]) -> Tensor:
        for part in range(len(self.lengths_of_parts(own))):
            self.reached(part)
            self.done += 1
            if not may_continue():
                break
        return torch.full((2, 2), float(self.done), dtype=torch.float64)


@contextlib.contextmanager
def two_pipelines(
    watchdogs: Sequence[Watchdog], told: Callable[[int], bool], runners: Sequence[Parts]
) -> Iterator[list[Future[tuple[bool, Control]]]]:
    """Evaluate in two workers, which by their ranks may be told to stop; each gives whether it was done, and its
    control state."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TRANSPORT.timeout)
    job, groups = load_job(make_spec(ADAMW)), pair(store)
    members = [Member(name=f"w{rank}", uid=f"u{rank}", address="127.0.0.1:1") for rank in range(2)]
    generation = Generation(
        job_uid="job", layout_generation=1, stages=1, pipelines=2, members=members, leader="w0", nonce="n",
        reason=ResizeReason.START,
    )  # fmt: skip

    def evaluate_on(rank: int) -> tuple[bool, Control]:
        layout = StageLayout(generation, rank, [(0, 0), (1, 0)], Cut([range(job.num_layers + 2)], 16))
        own = groups[rank]
        member = mock.Mock(layout=layout, groups=own, world=own.world, leader=None, runner=runners[rank])
        state, barrier = WorkerState(job.num_layers, control=Control(step=5)), Barrier(watchdogs[rank])
        done = evaluate(job, state, member, watchdogs[rank], barrier, mock.Mock(stop_requested=partial(told, rank)))
        return done, state.control

    with ThreadPoolExecutor(2) as threads:
        yield [threads.submit(evaluate_on, rank) for rank in range(2)]
    for each in groups:
        each.drop()


def test_an_evaluation_ends_for_all_when_a_finished_member_is_told_to_stop() -> None:
    runners, asked = [Parts(), Parts()], iter([False, *[True] * 9])

    with two_pipelines([Watchdog(), Watchdog()], lambda rank: rank == 1 and next(asked), runners) as results:
        ended = [result.result(30) for result in results]

    assert [(done, control.evaluated_step) for done, control in ended] == [(False, 0)] * 2
    assert runners[0].done < 9


def test_pipelines_with_parts_of_different_number_evaluate_all_of_them() -> None:
    runners = [Parts(), Parts()]

    with two_pipelines([Watchdog(), Watchdog()], lambda rank: False, runners) as results:
        ended = [result.result(30) for result in results]

    assert [runner.done for runner in runners] == [9, 3]
    assert [(done, control.metrics) for done, control in ended] == [(True, {"loss": 1.0, "accuracy": 1.0})] * 2


def test_members_agree_after_the_first_part_of_longer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there were short ones in a second could take minutes."""
    reached_at_each, instants = list[int](), itertools.count()
    clock = mock.Mock(perf_counter=lambda: 1e-6 * next(instants))
    monkeypatch.setattr("pipetransformer.training.evaluation.time", clock)
    runners = [Parts(short=5), Parts(short=5)]

    def told(rank: int) -> bool:
        if rank == 0:
            reached_at_each.append(runners[0].done)
        return False

    with two_pipelines([Watchdog(), Watchdog()], told, runners) as results:
        assert all(result.result(30)[0] for result in results)

    assert reached_at_each == [1, 3, 5, 6, 8], "and begin again with one where the length changes"


def test_members_agree_about_once_a_second_by_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part takes 0.4 s in one pipeline, and almost no time in the other, which has fewer."""
    clock, reached_at_each = threading.local(), list[int]()

    def take(seconds: float, part: int) -> None:
        clock.now = getattr(clock, "now", 0.0) + seconds

    def told(rank: int) -> bool:
        if rank == 0:
            reached_at_each.append(runners[0].done)
        return False

    monkeypatch.setattr(
        "pipetransformer.training.evaluation.time", mock.Mock(perf_counter=lambda: getattr(clock, "now", 0.0))
    )
    runners = [Parts(partial(take, 0.4)), Parts(partial(take, 0.01))]
    with two_pipelines([Watchdog(), Watchdog()], told, runners) as results:
        assert all(result.result(30)[0] for result in results)

    assert reached_at_each == [1, 3, 5, 7]


def test_a_peer_that_hangs_in_the_first_evaluation_is_found() -> None:
    released = threading.Event()

    def hang(part: int) -> None:
        if part == 1:
            assert released.wait(30)

    watchdogs = [Watchdog(floor_seconds=0.1, first_seconds=0.5), Watchdog()]
    watchdogs[0].start()
    with two_pipelines(watchdogs, lambda rank: False, [Parts(), Parts(hang)]) as results:
        with pytest.raises(RuntimeError):
            results[0].result(20)
        released.set()
        with pytest.raises(RuntimeError):
            results[1].result(20)
    watchdogs[0].stop()
