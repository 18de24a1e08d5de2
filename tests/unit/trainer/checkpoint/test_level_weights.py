"""Weights that a level kept are read ahead in a thread, and each unit is handed out once."""

import threading
import time
from pathlib import Path

import pytest
import torch

from pipetransformer.checkpoint.level_weights import LevelWeights
from pipetransformer.errors import StorageError
from pipetransformer.job.job import Job
from pipetransformer.models import unit_name
from pipetransformer.storage import CheckpointInfo, commit, save_unit
from tests.testkit.trainer.levels import level_job

UNITS = 6


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return level_job("own-vit", tmp_path)


def keep(job: Job, tmp_path: Path) -> None:
    """As a run that left level 0 keeps its weights; a unit's number is its value."""
    left = job.visits[0].end
    info = CheckpointInfo(step=left, boundary=0, layout_generation=1, num_layers=UNITS - 2)
    location = str(tmp_path / "checkpoints" / "levels" / "0")
    for unit in range(UNITS):
        save_unit(location, info, unit_name(unit, UNITS - 2), {"w": torch.tensor([float(unit)])})
    commit(location, info)


def wait_for_the_reader() -> None:
    deadline = time.monotonic() + 20
    while any(thread.name == "read-level" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_was_read_ahead_needs_no_storage(job: Job, tmp_path: Path) -> None:
    keep(job, tmp_path)
    weights = LevelWeights(job)

    weights.read_ahead(0, [1, 2])
    wait_for_the_reader()
    (tmp_path / "checkpoints").rename(tmp_path / "gone")

    assert [float(weights.read(0, unit)["w"]) for unit in (1, 2)] == [1.0, 2.0]
    with pytest.raises(StorageError):  # the caller may have changed what it got
        weights.read(0, 1)


def test_a_role_that_nobody_foresaw_is_read_at_once(job: Job, tmp_path: Path) -> None:
    keep(job, tmp_path)
    weights = LevelWeights(job)

    weights.read_ahead(0, [1])
    wait_for_the_reader()

    assert float(weights.read(0, 4)["w"]) == 4.0


def test_a_storage_that_failed_ahead_is_asked_again(job: Job, tmp_path: Path) -> None:
    weights = LevelWeights(job)
    weights.read_ahead(0, [1])
    wait_for_the_reader()

    keep(job, tmp_path)

    assert float(weights.read(0, 1)["w"]) == 1.0


def test_what_is_forgotten_comes_from_the_storage(job: Job, tmp_path: Path) -> None:
    keep(job, tmp_path)
    weights = LevelWeights(job)
    weights.read_ahead(0, [1])
    wait_for_the_reader()

    weights.forget()
    (tmp_path / "checkpoints").rename(tmp_path / "gone")

    with pytest.raises(StorageError):
        weights.read(0, 1)
