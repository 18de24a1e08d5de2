"""Frozen units are read from storage while a joiner waits, and then do not travel in the pause."""

from pathlib import Path

import pytest
import torch

from pipetransformer.checkpoint.prefetch import Prefetcher
from pipetransformer.hooks import HookPoint
from pipetransformer.models import unit_name
from pipetransformer.storage import CheckpointInfo, commit, save_unit
from tests.testkit.trainer.harness import Faults, Scripted, run_job
from tests.testkit.trainer.ledger_checker import check
from tests.testkit.trainer.numerics import ADAMW, EPOCHS, STAY_ALONE, TRAINING_SAMPLES, compare, make_spec

pytestmark = pytest.mark.timeout(180)


def write(location: Path, step: int, boundary: int, fell_step: int = 0) -> None:
    """A checkpoint of four units, each filled with its step."""
    state = {"fellStep": fell_step}
    info = CheckpointInfo(step=step, boundary=boundary, layout_generation=1, num_layers=2, state=state)
    for unit in range(4):
        tensors = {"w": torch.full((2,), float(step))}
        save_unit(str(location), info, unit_name(unit, 2), tensors)
    commit(str(location), info)


def prefetcher(location: Path, skipped: tuple[int, ...] = ()) -> Prefetcher:
    return Prefetcher(str(location), 2, skipped)


def steps_of(reader: Prefetcher) -> dict[int, int]:
    """By unit, the step of the checkpoint that it was read from."""
    return {unit: int(read.tensors["w"][0]) for unit, read in reader.units.items()}


def test_only_what_is_frozen_is_read_and_again_only_once_it_has_trained(tmp_path: Path) -> None:
    reader = prefetcher(tmp_path)
    reader.look()
    assert reader.units == {}, "there is no checkpoint"

    write(tmp_path, 4, boundary=1)
    reader.look()
    assert steps_of(reader) == {0: 4, 1: 4}

    write(tmp_path, 6, boundary=2)
    reader.look()
    assert steps_of(reader) == {0: 4, 1: 4, 2: 6}

    write(tmp_path, 9, boundary=1, fell_step=8)
    reader.look()
    assert steps_of(reader) == {0: 9, 1: 9, 2: 6}
    assert {unit: read.fell_step for unit, read in reader.units.items()} == {0: 8, 1: 8, 2: 0}


def test_a_unit_that_thawed_at_the_step_of_its_checkpoint_is_read_again(tmp_path: Path) -> None:
    """A worker that left wrote the first checkpoint before the freeze policy was asked."""
    reader = prefetcher(tmp_path)
    write(tmp_path, 8, boundary=2)
    reader.look()

    write(tmp_path, 12, boundary=2, fell_step=8)
    reader.look()

    assert steps_of(reader) == {0: 12, 1: 12, 2: 12}


def test_a_unit_that_shares_a_parameter_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, 4, boundary=2)
    reader = prefetcher(tmp_path, skipped=(0,))

    reader.look()

    assert sorted(reader.units) == [1, 2]


def test_a_member_reads_no_more_and_holds_nothing_that_was_read(tmp_path: Path) -> None:
    write(tmp_path, 4, boundary=1)
    reader = prefetcher(tmp_path)
    reader.look()
    assert reader.units

    reader.stop()
    reader.look()

    assert reader.units == {}


def test_a_joiner_that_has_read_ahead_trains_as_if_it_had_been_sent_everything(tmp_path: Path) -> None:
    stayed = run_job(make_spec(ADAMW), STAY_ALONE, tmp_path / "stay")
    spec = make_spec(ADAMW, checkpoint={"location": str(tmp_path / "checkpoint"), "everySteps": 1})
    run_job(spec, STAY_ALONE, tmp_path / "run", faults={0: Faults(killed_at=(HookPoint.ENDED, 20))})

    script = [Scripted(1, 1, [0]), Scripted(1, 2, [0, 1], at_step=28)]
    has_read = tmp_path / "has-read"
    faults = {0: Faults(awaits=(27, has_read)), 1: Faults(notes_read_ahead=has_read)}
    run = run_job(spec, script, tmp_path / "run", first_generation=2, faults=faults)

    compare(run, stayed)
    assert check(tmp_path / "run", TRAINING_SAMPLES, EPOCHS).clean
    whole = run_job(make_spec(ADAMW), script, tmp_path / "without").summary["generations"][1]["bytes_moved"]
    assert 0 < run.summary["generations"][-1]["bytes_moved"] < whole
