"""Samples that processes read ahead: what is trained is what would be trained without, and the processes end."""

import gc
import multiprocessing.forkserver
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipetransformer import current_micro_batch, train
from pipetransformer.data import Readers, load_dataset, read_batch
from pipetransformer.data.readers import _Reader
from pipetransformer.errors import SpecError
from pipetransformer_contract.spec import Data, TrainerSpec
from tests.testkit import ROOT, forked
from tests.testkit.trainer.harness import Ran, Scripted, run_job
from tests.testkit.trainer.script import run
from tests.testkit.trainer.storing import until
from tests.testkit.user_code.lazy_data import BATCH, STEPS_PER_EPOCH, Lazy, lazy, noted
from tests.testkit.user_code.linear_model import model

pytestmark = pytest.mark.timeout(120)

STEPS = 3 * STEPS_PER_EPOCH
SCRIPT_STEPS = 8  #: of a script that trains two epochs
READERS = 2


@pytest.fixture(autouse=True, scope="module")
def _server() -> None:
    """Processes fork from the server of the tests, which has imported what a trainer needs."""
    forked.context(*forked.TRAINER)
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def make_spec(folder: Path, *, readers: int, steps: int = STEPS) -> TrainerSpec:
    """A small ViT in float64; blocks freeze in the first and the second epoch, and are cached."""
    return TrainerSpec.model_validate(
        {
            "model": {"name": "vit", "numLayers": 3, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4},
            "data": {
                "name": "tests.testkit.user_code.lazy_data:load",
                "path": str(folder / "log"),
                "loaderProcesses": readers,
            },
            "training": {"steps": steps, "globalBatchSize": BATCH, "precision": "Float64"},
            "freeze": {"policy": "Explicit", "boundaries": [{"step": 2, "boundary": 1}, {"step": 7, "boundary": 2}]},
            "pipeline": {"microBatchSize": 3},
            "cache": {"policy": "Always"},
            "checkpoint": {"location": str(folder / "checkpoint"), "everySteps": 4},
            "numShards": 2,
        }
    )


def readers_of(folder: Path) -> set[int]:
    """Processes that have read a sample of a step; what warms up a worker is of the first."""
    return {pid for pid, step, _ in noted(folder / "log") if step}


def alone(spec: TrainerSpec, folder: Path) -> Ran:
    """In this process; a checkpoint is gone on from."""
    train(
        model=spec.model,
        data=spec.data,
        training=spec.training,
        freeze=spec.freeze,
        cache=spec.cache,
        checkpoint=spec.checkpoint,
        run_dir=folder,
    )
    return Ran(folder)


def test_losses_are_those_of_a_run_that_reads_in_its_steps(tmp_path: Path) -> None:
    def computed(readers: int) -> tuple[list[tuple[float, float]], dict[str, float]]:
        folder = tmp_path / str(readers)
        folder.mkdir()
        ran = alone(make_spec(folder, readers=readers), folder)
        assert len(readers_of(folder) - {os.getpid()}) == readers
        return [(step["loss"], step["gradientNorm"]) for step in ran.steps], ran.summary["metrics"]

    assert computed(READERS) == computed(0)


def test_processes_stay_over_a_regroup_and_no_sample_is_lost_or_repeated_by_it_or_a_resume(tmp_path: Path) -> None:
    (folder := tmp_path / "reference").mkdir()
    reference = run_job(make_spec(folder, readers=0), [Scripted(1, 1, [0])], folder)

    script = [Scripted(1, 2, [0, 1]), Scripted(2, 1, [1, 0], at_step=3)]
    run_job(make_spec(tmp_path, readers=READERS, steps=8), script, tmp_path)
    assert len(readers_of(tmp_path)) == 2 * READERS
    ran = alone(make_spec(tmp_path, readers=READERS), tmp_path)

    assert (ran.summary["samples_lost"], ran.summary["samples_repeated"]) == (0, 0)
    assert len(ran.summary["generations"]) == 3
    assert sum(entry["hits"] for entry in ran.summary["cache"]) > 0
    for ours, theirs in zip(ran.steps, reference.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9), ours["step"]
        assert ours["gradientNorm"] == pytest.approx(theirs["gradientNorm"], rel=1e-9), ours["step"]


class Waiting(nn.Module):
    """A head that lets no step but the last end before a sample of the next one is being read."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log
        self.layer = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        step, deadline = current_micro_batch().step, time.monotonic() + 30
        while self.training and 0 < step < SCRIPT_STEPS - 1 and all(read != step + 1 for _, read, _ in noted(self.log)):
            assert time.monotonic() < deadline, f"step {step} ends, and nothing of the next one is read"
            time.sleep(0.01)
        return self.layer(x)  # type: ignore[no-any-return]


def train_on(folder: Path, split: Lazy, **changes: Any) -> None:
    run(folder, **{"model": model, "data": lazy(split), "loader_processes": READERS} | changes)


def test_the_next_steps_samples_are_read_while_a_step_is_trained(log: Path, tmp_path: Path) -> None:
    train_on(tmp_path, Lazy(log, torch.float32), model=partial(model, partial(Waiting, log)))


def test_what_a_dataset_raises_is_the_users_error(log: Path, tmp_path: Path) -> None:
    message = r"spec\.data: one of the samples .*\b2\b.* cannot be read: OSError: the volume is gone"
    with pytest.raises(SpecError, match=message) as raised:
        train_on(tmp_path, Lazy(log, torch.float32, unreadable=2))
    assert raised.value.reason == "DataUnreadable"
    assert any("in _read" in note for note in raised.value.__notes__), "it says where"


def test_a_process_that_is_killed_is_replaced(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    split = Lazy(log, deadly=7)
    readers = Readers(lazy(split), READERS)
    with readers:
        inputs, targets = readers.read("train", range(10), 3)

    expected = read_batch(Lazy(log), range(10), 3)
    assert torch.equal(inputs, expected[0]) and torch.equal(targets, expected[1])
    said = [record.getMessage() for record in caplog.records if record.name == "pipetransformer.data.readers"]
    assert said == ["a loader process died (exit code -9); replacing it"]


def test_samples_that_kill_every_process_end_the_run_in_the_step_that_needs_them(log: Path) -> None:
    readers = Readers(lazy(Lazy(log, deadly=7, always=True)), READERS)
    with readers:
        readers.read("train", [1, 2], 0, following=[(1, 7), (1, 8)])
        readers.read("train", [8], 1)
        with pytest.raises(
            SpecError, match=r"two loader processes died reading the samples 7 \(exit code -9\)"
        ) as raised:
            readers.read("train", [7, 9], 1)

    assert raised.value.reason == "DataUnreadable"


class Large(Lazy):
    """More than a pipe holds."""

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(ids), 4 << 20), torch.zeros(len(ids))


def test_the_end_of_a_process_in_the_middle_of_its_answer_is_noticed(log: Path) -> None:
    reader = _Reader(pickle.dumps({"train": Large(log)}))
    pipe = reader.start()
    pipe.send(("train", [0], None))
    assert pipe.poll(30), "it has begun to answer"
    reader.kill()
    with pytest.raises((EOFError, OSError)):
        reader._answer(pipe)
    assert reader.end() == "exit code -9"


def test_what_was_begun_for_another_deal_is_taken_by_sample_or_dropped(log: Path) -> None:
    readers = Readers(lazy(Lazy(log)), READERS)
    with readers:
        readers.read("train", [0, 1], 0, following=[(1, sample) for sample in (2, 3, 4, 5)])
        readers.read("test", [2], None, following=[(None, 3)])
        # A regroup: this worker's pipeline trains others.
        inputs, targets = readers.read("train", [9, 4, 4, 3], 1, following=[(2, 6)])
        readers.read("train", [6], 2)
        assert [list(begun) for begun in readers._ahead.values()] == [[], [(None, 3)]]

    expected = read_batch(Lazy(log.with_name("other")), [9, 4, 4, 3], 1)
    assert torch.equal(inputs, expected[0]) and torch.equal(targets, expected[1])
    read = [(step, sample) for _, step, sample in noted(log)]
    assert len(read) == len(set(read)), "none was read twice"


class Held(Lazy):
    """Its sample 2 is read once a file exists."""

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        if 2 in ids:
            until(self.log.with_name("go").exists)
        return super().batch(ids)


def test_what_is_needed_no_longer_is_not_read_before_what_is(log: Path) -> None:
    readers = Readers(lazy(Held(log)), 1)
    with readers, ThreadPoolExecutor(1) as thread:
        readers.read("train", [0], None, following=[(None, sample) for sample in (2, 3, 4)])
        late = thread.submit(readers.read, "train", [9], None, [(None, 6)])
        until(lambda: list(readers._ahead["train", True]) == [(None, 6)])
        log.with_name("go").touch()
        late.result(30)
        readers.read("train", [6], None)

    assert [sample for _, _, sample in noted(log)] == [0, 2, 9, 6]


class Drawn(Lazy):
    """Samples are random numbers."""

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        numbers = [[torch.rand(()).item(), np.random.rand(), random.random()] for _ in ids]
        return torch.tensor(numbers), torch.full((len(ids),), os.getpid())


def test_processes_draw_other_random_numbers(log: Path) -> None:
    with (readers := Readers(lazy(Drawn(log)), READERS)):
        numbers, processes = readers.read("train", range(8 * READERS), None)
    assert len(set(processes.tolist())) == READERS
    for each in numbers.T:
        assert len(set(each.tolist())) == len(each)


class Counted(Lazy):
    """Samples tell how many objects its process's collections of garbage leave alone, and how many they visit."""

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor([[gc.get_freeze_count(), len(gc.get_objects())] for _ in ids]), torch.zeros(len(ids))


def test_collections_of_garbage_leave_alone_what_the_server_imported(log: Path) -> None:
    with (readers := Readers(lazy(Counted(log)), 1)):
        [[left, visited]], _ = readers.read("train", [0], None)
    assert left > visited


def test_processes_leave_an_interrupt_to_the_worker(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (readers := Readers(lazy(Lazy(log)), 1)):
        [process] = multiprocessing.active_children()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        readers.read("train", [1], None)
        assert process.is_alive()
    assert "died" not in caplog.text


def test_rows_of_tensors_need_no_process() -> None:
    assert Readers.of(load_dataset(Data(name="digits"), dtype=torch.float32), READERS) is None
    assert (
        Readers.of(
            load_dataset(Data(name="text", options={"task": "Class", "packages": ["json"]}), dtype=torch.float32),
            READERS,
        )
        is None
    )


class Closed(Lazy):
    """As with an open file."""

    def __getstate__(self) -> object:
        raise TypeError("cannot pickle '_io.BufferedReader' object")


class Gone(Lazy):
    def __setstate__(self, state: object) -> None:
        raise FileNotFoundError("the index is elsewhere")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Closed, "cannot be sent to loader processes: TypeError: cannot pickle .* or set this field to 0"),
        (Gone, "a loader process cannot load the dataset: FileNotFoundError: the index is elsewhere"),
    ],
)
def test_a_dataset_that_processes_cannot_have_is_refused_before_the_first_step(
    kind: type[Lazy], message: str, log: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=f"spec.data.loaderProcesses: .*{message}"):
        train_on(tmp_path, kind(log, torch.float32))
    assert not (tmp_path / "run" / "steps.jsonl").exists()
    assert not multiprocessing.active_children()


PROGRAM = """
import multiprocessing, os, pathlib, sys, threading, time
from pipetransformer.data import Readers
from tests.testkit.user_code.lazy_data import Lazy, lazy
with Readers(lazy(Lazy(pathlib.Path(sys.argv[1]))), 2):
    print(*(each.pid for each in multiprocessing.active_children()), flush=True)
    time.sleep(60)
"""


def test_no_process_outlives_a_worker_that_is_killed(log: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, log], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        processes = [os.pidfd_open(int(pid)) for pid in worker.stdout.readline().split()]
        worker.kill()
        deadline = time.monotonic() + 10
        ended = [bool(select.select([each], [], [], max(0, deadline - time.monotonic()))[0]) for each in processes]

    for each in processes:
        os.close(each)
    assert ended == [True, True]


def test_no_process_outlives_its_readers(log: Path) -> None:
    with Readers(lazy(Lazy(log)), READERS):
        assert len(multiprocessing.active_children()) == READERS
    assert not multiprocessing.active_children()


UNGUARDED = """
import pathlib
import torch
from tests.testkit.user_code.lazy_data import Lazy, lazy
from pipetransformer import Training, train
from tests.testkit.user_code.linear_model import model
data = lazy(Lazy(pathlib.Path("log"), torch.float32))
train(model=model, data=data, loader_processes=2, training=Training(steps=1, global_batch_size=4))
"""


@pytest.mark.slow
def test_a_script_whose_import_trains_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # where the script finds the testkit
    command = [sys.executable, "script.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 1
    assert "train under `if __name__ == '__main__':`" in ran.stderr
    assert "a loader process ended while it started" in ran.stderr


def test_a_process_that_is_told_to_end_before_it_has_started_ends() -> None:
    reader = _Reader(pickle.dumps({}))
    reader.kill()
    with pytest.raises((EOFError, ConnectionError)):
        reader.start()
    assert reader.end() == "exit code -9"
