"""One worker that stores what it has trained, and a storage that fails for a while."""

import datetime
import functools
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from pipetransformer.checkpoint import checkpointer as module
from pipetransformer.checkpoint import storage_work
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import GenerationGroups, Transport
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer.job.job import Job
from pipetransformer.partition import Cut
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.messages import Generation, Member, ResizeReason


def lone_layout(job: Job) -> StageLayout:
    """The layout of one worker that holds all units."""
    member = Member(name="w0", uid="u0", address="127.0.0.1:1")
    generation = Generation(
        job_uid="job", layout_generation=3, stages=1, pipelines=1, members=[member], leader="w0", nonce="n",
        reason=ResizeReason.START,
    )  # fmt: skip
    return StageLayout(generation, 0, [(0, 0)], Cut([range(job.num_layers + 2)], 16))


@functools.cache
def alone() -> tuple[GenerationGroups, Barrier]:
    """The groups of one worker, and its barrier."""
    groups = GenerationGroups()
    groups.meet(HashStore(), 0, 1, 0, Transport("127.0.0.1", datetime.timedelta(seconds=60)))
    return groups, Barrier(Watchdog())


def trained(job: Job, step: int) -> WorkerState:
    """The state of a worker that holds all units, after `step` committed steps."""
    units = job.build_units(range(job.num_layers + 2))
    return WorkerState(job.num_layers, control=Control(step=step), units=units)


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    """Wait until the condition holds, at most so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Outage:
    """A storage that fails until it is back: at each unit, or at each marker.

    Attributes:
        attempts: times that it was asked and failed.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, owner: ModuleType | None = None
    ) -> None:
        self.back = threading.Event()
        self.attempts = 0
        owner = owner or (module if name == "commit" else storage_work)
        real = getattr(owner, name)

        def fail(*arguments: Any, **named: Any) -> Any:
            if self.back.is_set():
                return real(*arguments, **named)
            self.attempts += 1
            raise error

        monkeypatch.setattr(owner, name, fail)
        monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.05)
