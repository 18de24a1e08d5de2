"""Workers whose job stops are told so by the channel: they end once a checkpoint of their state is durable."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.storage import latest
from pipetransformer_contract.choose import OnPack, Packing
from pipetransformer_contract.layout import Layout
from tests.testkit.trainer.stub_channel import StubChannel
from tests.testkit.trainer.workers import SPEC, Workers

pytestmark = pytest.mark.timeout(240)
LONG = SPEC | {"training": {"epochs": 10000, "globalBatchSize": 100}, "freeze": {"policy": "None"}}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    started = Workers(tmp_path, OnPack.WIDEN, Packing.PAPER, StubChannel)
    yield started
    started.close()


@pytest.fixture
def storage(workers: Workers) -> Path:
    """Where two workers that train keep their checkpoints."""
    folder = workers.folder / "checkpoint"
    workers.start(LONG | {"checkpoint": {"location": str(folder)}})
    channel = workers.channel
    assert channel.wait_for(lambda: any(report.step > 0 for report in channel.reports), 120)
    return folder


def take_away(storage: Path) -> None:
    """Put a file where the folder should be."""
    storage.rename(storage.with_name("away"))
    storage.write_text("")


def ended(workers: Workers, code: int = 0) -> list[dict[str, Any]]:
    """What the workers said at their end."""
    assert [workers.wait_for(number, 60) for number in range(2)] == [code, code]
    return [workers.termination(number) for number in range(2)]


def test_members_told_to_stop_end_once_their_checkpoint_is_durable(workers: Workers, storage: Path) -> None:
    workers.channel.stop()

    said = ended(workers)

    left = latest(str(storage))
    assert left is not None and [line["savedStep"] for line in said] == [left.step] * 2
    assert workers.channel.reports[-1].checkpoint_step == left.step
    assert workers.channel.outcome is None


def test_a_refused_last_checkpoint_is_written_once_the_storage_takes_it(workers: Workers, storage: Path) -> None:
    take_away(storage)
    channel = workers.channel
    channel.stop()
    assert channel.wait_for(lambda: any("spec.checkpoint.location" in beat.unsaved for beat in channel.beats), 60)

    storage.unlink()

    said = ended(workers)
    left = latest(str(storage))
    assert left is not None and [line["savedStep"] for line in said] == [left.step] * 2


def test_members_out_of_time_end_without_a_checkpoint_or_a_failed_job(workers: Workers, storage: Path) -> None:
    take_away(storage)
    channel = workers.channel
    channel.stop()
    assert channel.wait_for(lambda: any(beat.unsaved for beat in channel.beats), 60)

    for number in range(2):
        workers.signal(number)

    assert all("savedStep" not in line for line in ended(workers, 143))
    assert channel.outcome is None


def test_members_write_the_checkpoint_that_is_asked_for_once_and_train_on(workers: Workers) -> None:
    spec = LONG | {"checkpoint": {"location": str(workers.folder / "checkpoint"), "everySteps": 1_000_000}}
    workers.start(spec)
    channel = workers.channel

    def made(token: str) -> list[int]:
        """Steps of the checkpoints that were reported under the token."""
        reported = [report.checkpoint for report in list(channel.reports)]
        return sorted({one.step for one in reported if one is not None and one.request == token})

    assert channel.wait_for(lambda: any(report.step > 0 for report in channel.reports), 120)
    channel.asks_for = "one"
    assert channel.wait_for(lambda: bool(made("one")), 60)
    last = channel.reports[-1].step
    assert channel.wait_for(lambda: channel.reports[-1].step > last + 3, 60), "it trains on"
    assert len(made("one")) == 1, "although it is still asked for"

    channel.publish(Layout(2, 1))
    assert channel.wait_for(lambda: len(made("one")) == 2, 60), "the next leader cannot know that it was heard"
    channel.asks_for = "two"
    assert channel.wait_for(lambda: bool(made("two")), 60)
    assert min(made("two")) > max(made("one"))
