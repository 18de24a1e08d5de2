"""Reads a job's file for a local run and refuses it with the words that the API server would use."""

import os
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import yaml

from ..api import PipeTrainingJob
from ..api.labels import FieldError
from ..api.schema import root_schema, without_nulls
from ..api.validate import validate_manifest

#: What the trainer's image runs.
TRAINER = (sys.executable, "-m", "pipetransformer")


class InvalidManifest(Exception):
    """The file is no valid job; `errors` name the fields."""

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = errors


def read_job(file: Path, run_dir: Path) -> PipeTrainingJob:
    """The job of a YAML file, made fit for this machine.

    Mounted paths of a cluster do not exist here: output goes to `run_dir`, checkpoints to `run_dir/checkpoints`; URLs
    are kept. Processes need no accelerator. A container's command runs in the present folder.

    Raises:
        InvalidManifest: the file is no valid job.
        OSError: it cannot be read.
    """
    manifest = read_manifest(file)
    metadata = {**manifest["metadata"], "uid": str(uuid.uuid4())}
    job = PipeTrainingJob.from_manifest(
        {**manifest, "metadata": metadata, "spec": _localised(manifest["spec"], run_dir), "status": {}}
    )
    if errors := _command_errors(job):
        raise InvalidManifest(errors)
    return job


def worker_command(job: PipeTrainingJob) -> list[str]:
    """What a worker's process runs: the trainer container's `command`, by default what its image runs, and `args`."""
    container = job.spec.pod_template.trainer().model_extra or {}
    return [*(container.get("command") or TRAINER), *(container.get("args") or ())]


def _command_errors(job: PipeTrainingJob) -> list[FieldError]:
    """In a cluster the API server's dry run of a pod says these; and that a program exists, its image."""
    trainer = job.spec.pod_template.trainer()
    container = trainer.model_extra or {}
    path = f"spec.podTemplate.spec.containers[{job.spec.pod_template.spec.containers.index(trainer)}]"
    errors = [
        FieldError(f"{path}.{field}", "must be a list of strings")
        for field in ("command", "args")
        if not isinstance(container.get(field) or [], list)
        or not all(isinstance(word, str) for word in container.get(field) or [])
    ]
    if not errors and shutil.which(program := worker_command(job)[0], path=search_path()) is None:
        errors.append(FieldError(f"{path}.command", f"{program} is no program of this machine"))
    return errors


def search_path() -> str:
    """Where a worker's program is looked for: beside this interpreter first, so that `python` is this one."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def read_manifest(file: Path) -> dict[str, Any]:
    """The manifest of one job, as it stands in a YAML file. Raises as `read_job`."""
    try:
        manifest = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidManifest([FieldError(str(file), f"is no YAML: {error}")]) from error
    return checked(manifest, str(file))


def checked(manifest: Any, source: str) -> dict[str, Any]:
    """The manifest as the API server reads it, if it is that of a valid job.

    Raises:
        InvalidManifest: it is not; the errors name its fields, or `source`.
    """
    if not isinstance(manifest, dict):
        raise InvalidManifest([FieldError(source, "must hold one PipeTrainingJob")])
    read: dict[str, Any] = without_nulls(root_schema(), manifest)
    if isinstance(metadata := read.get("metadata"), dict):
        read["metadata"] = {key: value for key, value in metadata.items() if value is not None}
    if errors := validate_manifest(read):
        raise InvalidManifest(errors)
    return read


def _localised(spec: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    spec = dict(spec)
    if spec.get("output", {}).get("location", "/").startswith("/"):
        spec["output"] = {"location": str(run_dir)}
    if spec.get("checkpoint", {}).get("location", "").startswith("/"):
        spec["checkpoint"] = {**spec["checkpoint"], "location": str(run_dir / "checkpoints")}
    return spec
