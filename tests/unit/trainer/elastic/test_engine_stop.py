"""Workers whose job stops are told so by the channel: they end once a checkpoint of their state is durable."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.storage import latest
from pipetransformer_contract.choose import OnPack, Packing
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
