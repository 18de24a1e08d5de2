"""Checkpoints by unit and the readable model folder, on a path and on fsspec URLs."""

import errno
import json
import math
import os
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from pipetransformer.data import load_dataset
from pipetransformer.errors import StaleCheckpointError
from pipetransformer.library.predict import accuracy
from pipetransformer.models import build_model
from pipetransformer.storage import (
    CheckpointInfo,
    Folder,
    Kind,
    ModelConfig,
    commit,
    find,
    latest,
    load_model,
    load_unit,
    retries,
    save_unit,
    write_model,
)
from pipetransformer_contract.spec import TrainerSpec

if TYPE_CHECKING:
    from tests.testkit.object_store import ObjectStore

UNITS = ["embedding", "blocks.0", "head"]


@pytest.fixture(params=["path", "file", "memory", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        store: ObjectStore = request.getfixturevalue("object_store")
        return f"s3://{store.new_bucket()}/checkpoints"
    return {
        "path": str(tmp_path / "checkpoints"),
        "file": f"file://{tmp_path}/checkpoints",
        "memory": f"memory://{uuid.uuid4()}/checkpoints",
    }[request.param]


def info(step: int, generation: int = 1, boundary: int = 0, nonce: str = "") -> CheckpointInfo:
    state = {"best": 0.5, "policy": {}}
    return CheckpointInfo(
        step=step, boundary=boundary, layout_generation=generation, nonce=nonce, num_layers=1, state=state
    )


def save(location: str, step: int, generation: int = 1) -> None:
    for number, unit in enumerate(UNITS):
        tensors = {"weight": torch.full((2, 3), step + number, dtype=torch.float64).t(), "step": torch.tensor(step)}
        save_unit(location, info(step, generation), unit, tensors)


def test_each_unit_comes_back_by_itself(location: str) -> None:
    save(location, 7)
    commit(location, info(7, boundary=1))
    found = latest(location)
    assert found == info(7, boundary=1)
    loaded = load_unit(location, found, "blocks.0")
    assert torch.equal(loaded["weight"], torch.full((3, 2), 8.0, dtype=torch.float64))
    assert loaded["step"].item() == 7


@pytest.mark.parametrize(("content", "damaged"), [(b'"F64"', b'"I64"'), (b"[3,2]", b"[2,3]"), (b'"step"', b'"stop"')])
def test_a_unit_whose_header_was_damaged_is_not_loaded(content: bytes, damaged: bytes, tmp_path: Path) -> None:
    save(str(tmp_path), 7)
    [file] = tmp_path.rglob("head.safetensors")
    assert content in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(content, damaged))
    with pytest.raises(OSError, match=r"head.safetensors is damaged: .* do not have the file's checksum"):
        load_unit(str(tmp_path), info(7), "head")


def test_complex_tensors_come_back_as_they_were(location: str) -> None:
    tensors = {f"{dtype}": torch.randn(2, 3, dtype=dtype).t() for dtype in (torch.complex64, torch.complex128)}
    for unit in UNITS:
        save_unit(location, info(7), unit, tensors)
    commit(location, info(7))
    loaded = load_unit(location, info(7), "blocks.0")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_other_programs_can_read_a_unit(tmp_path: Path) -> None:
    """Values of each type begin where a processor can read them, also behind others of an odd length."""
    types = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.float64]
    tensors = {f"{dtype}": torch.ones(3, dtype=dtype) for dtype in types} | {"none": torch.ones(0, 2)}

    save_unit(str(tmp_path), info(7), "head", tensors)

    [file] = tmp_path.rglob("head.safetensors")
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    content = file.read_bytes()
    values = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:values])
    begins = {name: values + header[name]["data_offsets"][0] for name in tensors}
    assert [begins[name] % tensor.itemsize for name, tensor in tensors.items()] == [0] * len(tensors)


def test_what_is_no_number_comes_back_as_it_was(location: str) -> None:
    save(location, 7)
    commit(location, info(7).model_copy(update={"state": {"best": {"f1": float("nan")}, "policy": float("-inf")}}))
    found = latest(location)
    assert found is not None
    assert math.isnan(found.state["best"]["f1"]) and found.state["policy"] == float("-inf")


def test_what_passes_is_not_noticed_and_what_does_not_is_said_at_once(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.001)
    folder, failures = Folder(location), [OSError(errno.EIO, "I/O"), TimeoutError(), RuntimeError("503")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    with mock.patch.object(folder.filesystem, "invalidate_cache", side_effect=fail):
        assert folder.names() == [] and failures == []
        failures += [OSError(errno.EIO, "never reached"), PermissionError("forbidden")]
        with pytest.raises(PermissionError, match="forbidden"):
            folder.names()
    assert len(failures) == 1


def test_a_storage_that_fails_is_asked_again_after_growing_pauses_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    monkeypatch.setattr("time.monotonic", lambda: sum(pauses))
    folder = Folder(str(tmp_path))
    failure = TimeoutError("no answer")
    with (
        mock.patch.object(folder.filesystem, "invalidate_cache", side_effect=failure),
        pytest.raises(TimeoutError),
    ):
        folder.names()
    assert pauses == [0.5, 1, 2, 4, 8, 10, 10, 10, 10]


def test_whatever_a_storage_raises_is_its_own_error(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PATIENCE_SECONDS", 0.0)
    folder = Folder(location)
    with (
        mock.patch.object(folder.filesystem, "ls", side_effect=RuntimeError("its event loop has closed")),
        pytest.raises(OSError, match="RuntimeError: its event loop has closed"),
    ):
        latest(location)
    with pytest.raises(FileNotFoundError):
        folder.read("nothing")


def test_there_is_no_checkpoint_before_its_marker(location: str) -> None:
    assert latest(location) is None
    save(location, 7)
    assert latest(location) is None


def test_the_newest_ones_are_kept(location: str) -> None:
    for step in (1, 2, 3):
        save(location, step)
        commit(location, info(step), keep=2)
    with pytest.raises(FileNotFoundError):
        load_unit(location, info(1), "head")
    assert load_unit(location, info(2), "head")["step"].item() == 2
    assert latest(location) == info(3)


def test_a_checkpoint_counts_although_older_ones_cannot_be_removed(
    location: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "PATIENCE_SECONDS", 0.0)
    save(location, 1)
    commit(location, info(1), keep=1)
    save(location, 2)
    with mock.patch.object(Folder(location).filesystem, "rm", side_effect=OSError(errno.EBUSY, "busy")):
        commit(location, info(2), keep=1)
    assert latest(location) == info(2) and "cannot be removed: [Errno 16] busy" in caplog.text

    save(location, 3)
    commit(location, info(3), keep=1)
    assert len(Folder(location).names()) == 1


def test_what_was_removed_already_is_removed(location: str) -> None:
    save(location, 1)
    folder = Folder(location)
    remove = folder.filesystem.rm

    def lose_the_answer(*arguments: Any, **named: Any) -> None:
        remove(*arguments, **named)
        raise TimeoutError

    name = folder.names()[0]
    with mock.patch.object(folder.filesystem, "rm", lose_the_answer), pytest.raises(TimeoutError):
        folder.remove(name)
    folder.remove(name)
    assert folder.names() == []


def test_a_storage_that_lets_nothing_be_removed_is_asked_once(
    location: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.001)
    save(location, 1)
    commit(location, info(1), keep=1)
    save(location, 2)
    refused = RuntimeError("403: under a retention policy")
    with mock.patch.object(Folder(location).filesystem, "rm", side_effect=refused) as remove:
        commit(location, info(2), keep=1)
    assert remove.call_count == 1
    assert "cannot be removed: RuntimeError: 403: under a retention policy" in caplog.text


def test_what_a_location_is_called_is_no_pattern(location: str) -> None:
    for step in (1, 2):
        save(f"{location}/sweep1", step)
        commit(f"{location}/sweep1", info(step))
    for step in (1, 2, 3):
        save(f"{location}/sweep[12]*", step)
        commit(f"{location}/sweep[12]*", info(step), keep=1)
    assert len(Folder(f"{location}/sweep[12]*").names()) == 1
    assert latest(f"{location}/sweep1") == info(2)
    assert len(Folder(f"{location}/sweep1").names()) == 2


def test_a_connection_that_fails_as_it_is_made_is_made_again(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.001)
    connect, failures = fsspec.core.url_to_fs, [ConnectionResetError("reset by peer"), Exception("no SSH banner")]

    def fail_first(url: str) -> Any:
        if failures:
            raise failures.pop()
        return connect(url)

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail_first)
    assert latest(location) is None and failures == []

    monkeypatch.setattr(retries, "PATIENCE_SECONDS", 0.0)
    failures.append(Exception("no SSH banner"))
    with pytest.raises(OSError, match="Exception: no SSH banner"):
        latest(location)
    with pytest.raises(ValueError, match="Protocol not known"):
        Folder("nowhere://bucket")


def test_one_that_is_being_written_survives_the_removal_of_old_ones(location: str) -> None:
    save(location, 4)
    save(location, 9)
    commit(location, info(4), keep=1)
    commit(location, info(9), keep=1)
    assert latest(location) == info(9)


def test_a_lower_generation_never_replaces_a_higher_one(location: str) -> None:
    save(location, 5, generation=3)
    commit(location, info(5, generation=3))
    save(location, 9, generation=2)
    with pytest.raises(StaleCheckpointError, match="generation 3 wrote the checkpoint of step 5"):
        commit(location, info(9, generation=2))
    assert latest(location) == info(5, generation=3)


def test_a_higher_generation_counts_even_at_an_earlier_step(location: str) -> None:
    for step, generation in ((9, 2), (5, 3)):
        save(location, step, generation)
        commit(location, info(step, generation))
    assert latest(location) == info(5, generation=3)


def test_of_two_runs_that_write_here_at_the_same_time_one_goes_on_and_nothing_is_of_both(location: str) -> None:
    def write(step: int, nonce: str, units: list[str]) -> None:
        for unit in units:
            save_unit(location, info(step, 3, nonce=nonce), unit, {"of": torch.tensor(ord(nonce[0]))})

    save(location, 2, generation=2)
    commit(location, info(2, 2))
    write(5, "another", UNITS[:2])
    write(5, "own", UNITS)
    commit(location, info(5, 3, nonce="own"))
    write(5, "another", UNITS[2:])
    with pytest.raises(StaleCheckpointError, match=r"another run, .* wrote step-000000000005-g3-[0-9a-f]{8} here"):
        commit(location, info(5, 3, nonce="another"))

    found = latest(location)
    assert found == info(5, 3, nonce="own")
    assert {load_unit(location, found, unit)["of"].item() for unit in UNITS} == {ord("o")}
    write(6, "own", UNITS)
    commit(location, info(6, 3, nonce="own"), keep=1)
    assert Folder(location).names() == [info(6, 3, nonce="own").folder]


@pytest.mark.parametrize("nonce", ["", "own"])
def test_a_checkpoint_that_a_user_renamed_or_copied_is_neither_taken_nor_removed(location: str, nonce: str) -> None:
    for step in (1, 2):
        for unit in UNITS:
            save_unit(location, info(step, 3, nonce=nonce), unit, {"of": torch.tensor(step)})
        commit(location, info(step, 3, nonce=nonce))
    root, renamed = Folder(location), info(2, 3, nonce=nonce).folder
    for file in root.sizes(renamed):
        root.write(f"{renamed}.bad/{file}", root.read(f"{renamed}/{file}"))
    root.remove(renamed)

    assert latest(location) == info(1, 3, nonce=nonce)
    for unit in UNITS:
        save_unit(location, info(3, 3, nonce=nonce), unit, {"of": torch.tensor(3)})
    commit(location, info(3, 3, nonce=nonce), keep=1)
    assert sorted(root.names()) == sorted([f"{renamed}.bad", info(3, 3, nonce=nonce).folder])


def test_a_checkpoint_that_lacks_a_units_file_never_counts(location: str) -> None:
    save(location, 7)
    for unit in UNITS[:-1]:
        save_unit(location, info(9), unit, {"step": torch.tensor(9)})

    with pytest.raises(FileNotFoundError, match=r"no head.*all workers must share this location"):
        commit(location, info(9), patience_seconds=0)
    with pytest.raises(FileNotFoundError, match=r"no blocks\.0.*all workers must share this location"):
        commit(location, info(11), patience_seconds=0)
    commit(location, info(7))
    assert latest(location) == info(7)


@pytest.mark.parametrize("damage", ["removed", "cut short"])
def test_a_durable_checkpoint_that_lost_a_file_no_longer_counts(location: str, damage: str) -> None:
    for step in (7, 9):
        save(location, step)
        commit(location, info(step))
    root = Folder(location)
    file = f"{info(9).folder}/{UNITS[1]}.safetensors"

    if damage == "removed":
        root.remove(file)
    else:
        root.write(file, root.read(file)[:-1])

    assert latest(location) == info(7)
    assert find(location, info(9).folder, patience_seconds=0) is None
    assert find(location, info(7).folder) == info(7)


def test_a_checkpoint_that_a_newer_one_has_replaced_is_not_waited_for(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(location, 9)
    commit(location, info(9))
    monkeypatch.setattr("time.sleep", mock.Mock(side_effect=AssertionError("it waits")))
    assert find(location, info(7).folder) is None
    with pytest.raises(AssertionError):
        find(location, info(11).folder)


def test_a_file_that_is_seen_late_is_waited_for(location: str) -> None:
    for unit in UNITS[:-1]:
        save_unit(location, info(9), unit, {"step": torch.tensor(9)})
    threading.Timer(0.2, save_unit, args=(location, info(9), UNITS[-1], {})).start()

    commit(location, info(9))

    assert latest(location) == info(9)


def test_two_that_write_the_same_file_at_once_both_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, sync, folder = threading.Barrier(2), os.fsync, Folder(str(tmp_path))

    def together(descriptor: int) -> None:
        both.wait(10)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", together)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda content: folder.write("file", content), [b"one", b"two"]))

    assert folder.read("file") in (b"one", b"two") and folder.names() == ["file"]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        Folder(str(tmp_path)).write("file", b"content")

    assert Folder(str(tmp_path)).names() == []


def test_a_filesystem_that_cannot_sync_folders_keeps_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []

    def sync(descriptor: int) -> None:
        synced.append(os.path.isdir(f"/proc/self/fd/{descriptor}"))  # noqa: PTH112
        if synced[-1]:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", sync)
    code = errno.EINVAL
    Folder(str(tmp_path)).write("file", b"content")
    assert synced == [False, True] and Folder(str(tmp_path)).read("file") == b"content"
    code = errno.EROFS
    with pytest.raises(OSError, match="Read-only"):
        Folder(str(tmp_path)).write("file", b"content")


def trainer_spec() -> TrainerSpec:
    return TrainerSpec.model_validate(
        {
            "model": {"name": "vit", "numLayers": 2, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32},
            "data": {"name": "digits"},
            "training": {"epochs": 1, "precision": "Float64"},
        }
    )


def write_small_model(location: str) -> torch.Tensor:
    """Write an untrained model and return one of its weights."""
    spec = trainer_spec()
    info = load_dataset(spec.data, dtype=torch.float64).info
    model = build_model(spec.model, info, seed=4, dtype=torch.float64)
    tensors = {
        f"{model.unit_name(index)}.{name}": parameter
        for index, unit in enumerate(model.units)
        for name, parameter in unit.state_dict().items()
    }
    config = ModelConfig(
        made_by="tests", kind=Kind.VIT, model_class="PipelineModel", function="", model=spec.model, data=spec.data,
        steps=0, precision=spec.training.precision, dtype="float64", input_shape=info.input_shape,
        input_dtype="float64", num_classes=info.num_classes, vocab_size=0, task=info.task, labels=info.labels,
    )  # fmt: skip
    write_model(location, tensors, config=config, info=info)
    return model.head.get_parameter("classifier.weight")


def test_a_model_folder_rebuilds_the_model(location: str) -> None:
    weight = write_small_model(location)
    model = load_model(location)
    assert torch.equal(model.head.get_parameter("classifier.weight"), weight)
    assert not any(unit.training for unit in model.units)
    assert 0 <= accuracy(model, load_dataset(trainer_spec().data, dtype=torch.float64).test) <= 1


def test_a_model_replaces_the_files_of_an_earlier_one_and_no_others(location: str) -> None:
    write_small_model(location)
    folder = Folder(location)
    described = json.loads(folder.read("pipetransformer.json"))
    assert described["files"] == ["model.safetensors"]
    described["files"] += ["model-00001-of-00002.safetensors", "templates/chat.jinja", "gone.json", "", "templates/.."]
    for name in ("model-00001-of-00002.safetensors", "templates/chat.jinja", "README.md"):
        folder.write(name, b"of an earlier model, or the user's")
    folder.write("pipetransformer.json", json.dumps(described).encode())

    write_small_model(location)

    kept = {"README.md", "model.safetensors", "pipetransformer.json"}
    assert kept == set(folder.names()) - {"templates"}
    assert not folder.exists("templates/chat.jinja")


def test_files_of_an_earlier_model_that_cannot_be_removed_end_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_small_model(str(tmp_path))
    described = json.loads((tmp_path / "pipetransformer.json").read_text())
    (tmp_path / "pipetransformer.json").write_text(json.dumps(described | {"files": ["old"]}))
    monkeypatch.setattr(Folder, "remove", mock.Mock(side_effect=PermissionError("the store does not allow it")))

    write_small_model(str(tmp_path))

    assert "old of an earlier model stays: the store does not allow it" in caplog.text
    assert load_model(str(tmp_path)).num_layers == 2


def test_a_model_folder_without_a_model_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"pipetransformer\.json"):
        load_model(str(tmp_path))


def test_the_predict_command_scores_a_model_folder(tmp_path: Path) -> None:
    write_small_model(str(tmp_path))
    command = [sys.executable, "-m", "pipetransformer", "predict", str(tmp_path)]
    printed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert printed["samples"] == 364
    assert 0 <= printed["accuracy"] <= 1
