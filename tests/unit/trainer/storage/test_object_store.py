"""Checkpoints and models in a store of objects, which knows no folders: S3, by HTTP. What holds for all locations is in
test_checkpoint.py."""

from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

from pipetransformer import Checkpoint, Evaluation, Training
from pipetransformer.errors import SpecError, StorageError
from pipetransformer.job.checks import check_storage
from pipetransformer.storage import CheckpointInfo, Folder, commit, latest, save_unit
from pipetransformer_contract.spec import Output, TrainerSpec
from tests.testkit.trainer.script import Log, run

if TYPE_CHECKING:
    from tests.testkit.object_store import ObjectStore

UNITS = ("embedding", "blocks.0", "head")


def written(location: str, step: int) -> CheckpointInfo:
    info = CheckpointInfo(step=step, boundary=0, layout_generation=1, num_layers=1)
    for unit in UNITS:
        save_unit(location, info, unit, {"step": torch.tensor(step)})
    return info


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole_and_keeps_the_newest(
    object_store: "ObjectStore", tmp_path: Path
) -> None:
    location = f"s3://{object_store.new_bucket()}/checkpoint"
    checkpoint, evaluation = Checkpoint(location=location, every_steps=1), Evaluation(every_steps=1, keep_best=True)
    run(tmp_path, checkpoint=checkpoint, evaluation=evaluation, training=Training(steps=3, global_batch_size=16))
    found = latest(location)
    assert found is not None and found.step == 3
    killed = found.model_copy(update={"step": 4})
    save_unit(location, killed, "embedding", {})

    log = Log()
    result = run(tmp_path, checkpoint=checkpoint, evaluation=evaluation, callbacks=[log])

    assert log.of("step") == [3, 4, 5, 6, 7] and result.steps == 8
    checkpoints = [name for name in Folder(location).names() if name.startswith("step-")]
    assert len(checkpoints) == 2 and killed.folder not in checkpoints
    assert len(Folder(f"{location}/best").names()) == 1


def test_a_worker_needs_no_rights_beyond_its_own_prefix(object_store: "ObjectStore") -> None:
    location = f"s3://{object_store.new_bucket()}/checkpoints"
    with object_store.answering(r"(HEAD|PUT) /[^/]*/?\?|GET /[^/]*/?\?location", "403 AccessDenied"):
        commit(location, info := written(location, 1))
    assert latest(location) == info


def test_a_bucket_that_is_missing_is_said_before_the_training_and_never_made(
    object_store: "ObjectStore", tmp_path: Path
) -> None:
    log = Log()
    with pytest.raises(
        StorageError, match=r"spec\.checkpoint\.location: s3://nowhere/x: The specified bucket does not"
    ):
        run(tmp_path, checkpoint=Checkpoint(location="s3://nowhere/x"), callbacks=[log])
    assert log.of("step") == []
    assert not any(request.startswith("PUT /nowhere?") for request in object_store.requests)


def test_an_output_that_cannot_be_written_is_said_before_the_training(object_store: "ObjectStore") -> None:
    location = f"s3://{object_store.new_bucket()}/output"
    spec = TrainerSpec.model_validate(
        {
            "model": {"name": "vit"},
            "data": {"name": "digits"},
            "training": {"steps": 1},
            "output": {"location": location},
        }
    )
    check_storage(spec)
    assert Folder(location).names() == []
    with (
        object_store.answering(r"PUT ", "403 AccessDenied"),
        pytest.raises(StorageError, match=r"spec\.output\.location: s3://.*/output: AccessDenied, it is said"),
    ):
        check_storage(spec)
    with pytest.raises(SpecError, match=r"spec\.output\.location: nope://x cannot be reached from here"):
        check_storage(spec.model_copy(update={"output": Output(location="nope://x")}))


def test_what_another_has_written_is_seen_whoever_has_listed_the_folder_meanwhile(object_store: "ObjectStore") -> None:
    bucket = object_store.new_bucket()
    folder = Folder(f"s3://{bucket}/checkpoints")
    object_store.put(f"{bucket}/checkpoints/a/file")
    assert folder.names() == ["a"] and folder.sizes("a") == {"file": 0}
    object_store.put(f"{bucket}/checkpoints/a/file", b"longer")
    object_store.put(f"{bucket}/checkpoints/b/file")
    with mock.patch.object(folder.filesystem, "invalidate_cache"):  # as if the other had put it back since
        assert folder.names() == ["a", "b"] and folder.sizes("a") == {"file": 6}


def test_a_folder_within_a_model_is_no_file_of_it(object_store: "ObjectStore", tmp_path: Path) -> None:
    (tmp_path / "vocabulary").mkdir()
    (tmp_path / "config.json").write_bytes(b"{}")
    assert Folder(str(tmp_path)).sizes("") == {"config.json": 2}
    bucket = object_store.new_bucket()
    object_store.put(f"{bucket}/model/vocabulary/words")
    object_store.put(f"{bucket}/model/config.json", b"{}")
    assert Folder(f"s3://{bucket}/model").sizes("") == {"config.json": 2}


def test_an_empty_folder_of_the_stores_console_is_no_file(object_store: "ObjectStore") -> None:
    bucket = object_store.new_bucket()
    object_store.put(f"{bucket}/model/")
    object_store.put(f"{bucket}/model/config.json")
    assert Folder(f"s3://{bucket}/model").names() == ["config.json"]


def test_a_store_that_removes_nothing_is_told_of(object_store: "ObjectStore", caplog: pytest.LogCaptureFixture) -> None:
    location = f"s3://{object_store.new_bucket()}/checkpoints"
    commit(location, written(location, 1), keep=1)
    refused = "<DeleteResult><Error><Code>AccessDenied</Code></Error></DeleteResult>"
    with object_store.answering(r"POST /[^/]*/?\?delete", "200 OK", refused):
        commit(location, written(location, 2), keep=1)
    assert "older checkpoints cannot be removed: " in caplog.text and "was not removed" in caplog.text
