"""What is measured of a round: the computations, and none of their waits for messages."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.models import MicroBatchContext
from pipetransformer.pipeline import Chunk, Executor, Span
from pipetransformer.pipeline.stopwatch import Stopwatch, make_stopwatch
from pipetransformer.schedules import OneForwardOneBackward, RoundShape, planned
from tests.testkit.trainer.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

#: Tag of a message that no schedule sends.
WAITING = 7


class Watch(Stopwatch):
    """Knows whether it runs. The second worker's tells the first worker when it stops for the first time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.runs, self._group, self._told = False, group, group.rank() == 0

    def start(self) -> None:
        assert not self.runs
        self.runs = True

    def stop(self) -> None:
        assert self.runs
        self.runs = False
        if not self._told:
            self._told = True
            dist.send(torch.zeros(1), group=self._group, group_dst=0, tag=WAITING)


class Unit(nn.Module):
    """Notes whether the watch runs. On the first worker its first forward lasts until the second worker waits."""

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.ran: list[bool] = []
        self._group, self._watch = group, watch

    def forward(self, x: Tensor) -> Tensor:
        if self._group.rank() == 0 and not self.ran:
            dist.recv(torch.zeros(1), group=self._group, group_src=1, tag=WAITING)
        self.ran.append(self._watch.runs)
        output: Tensor = self.linear(x)
        return output


class Ones:
    def take(self, number: int, context: MicroBatchContext) -> Tensor:
        return torch.ones(1, 2)


class Total:
    def take(self, output: Tensor, chunk: Chunk) -> Tensor:
        return output.sum()


def watched_round(group: dist.ProcessGroup) -> tuple[list[bool], bool]:
    watch, rank = Watch(group), group.rank()
    unit, shape = Unit(group, watch), RoundShape((0, 1), 3)
    span = Span(range(rank, rank + 1), {"unit": unit}, 0, first=rank == 0, last=rank == 1, dtype=torch.float32)
    chunks = [Chunk(number, MicroBatchContext(0, (number,)), (1, 2), Ones()) for number in range(3)]
    executor = Executor({rank: span}, group, torch.device("cpu"), torch.float32)
    executor.run(planned(OneForwardOneBackward(), shape)[rank], shape, chunks, Total(), None, watch)
    return unit.ran, watch.runs


def test_a_worker_that_waits_for_a_message_is_not_measured_and_one_that_computes_is() -> None:
    assert run_ranks(2, watched_round) == [([True] * 3, False)] * 2


def test_a_stopwatch_sums_what_it_saw_and_begins_again() -> None:
    watch = Stopwatch()
    for _ in range(2):
        watch.start()
        watch.stop()
    assert 0 < watch.take() < 1
    assert watch.take() == 0
    watch.start()
    watch.stop()
    watch.reset()
    assert watch.take() == 0


class Event:
    """A CUDA event on a device that finishes its work only when somebody waits for it."""

    finished = 0.0
    recorded = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        Event.recorded += 1
        self.at = Event.recorded

    def synchronize(self) -> None:
        Event.finished = max(Event.finished, self.at)

    def elapsed_time(self, end: "Event") -> float:
        if max(self.at, end.at) > Event.finished:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.at - self.at


def test_a_stopwatch_of_a_device_waits_for_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose layers are all frozen reaches its vote before its device has finished."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    watch = make_stopwatch(torch.device("cuda"))
    assert watch.take() == 0
    for _ in range(2):
        for _ in range(3):
            watch.start()
            watch.stop()
        assert watch.take() == pytest.approx(0.003)
