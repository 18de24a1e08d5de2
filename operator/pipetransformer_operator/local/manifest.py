"""Reads a job's file for a local run and refuses it with the words that the API server would use."""

import uuid
from pathlib import Path
from typing import Any

import yaml

from ..api import PipeTrainingJob
from ..api.labels import FieldError
from ..api.validate import validate_manifest


class InvalidManifest(Exception):
    """The file is no valid job; `errors` name the fields."""

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = errors


def read_job(file: Path, run_dir: Path) -> PipeTrainingJob:
    """The job of a YAML file, made fit for this machine.

    Mounted paths of a cluster do not exist here: output goes to `run_dir`, checkpoints to `run_dir/checkpoints`; URLs
    are kept. Processes need no accelerator.

    Raises:
        InvalidManifest: the file is no valid job.
        OSError: it cannot be read.
    """
    try:
        manifest = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise InvalidManifest([FieldError(str(file), f"is no YAML: {error}")]) from error
    if not isinstance(manifest, dict):
        raise InvalidManifest([FieldError(str(file), "must hold one PipeTrainingJob")])
    if errors := validate_manifest(manifest):
        raise InvalidManifest(errors)
    metadata = {**manifest["metadata"], "uid": str(uuid.uuid4())}
    return PipeTrainingJob.from_manifest(
        {**manifest, "metadata": metadata, "spec": _localised(manifest["spec"], run_dir), "status": {}}
    )


def _localised(spec: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    spec = dict(spec)
    if spec.get("output", {}).get("location", "/").startswith("/"):
        spec["output"] = {"location": str(run_dir)}
    if spec.get("checkpoint", {}).get("location", "").startswith("/"):
        spec["checkpoint"] = {**spec["checkpoint"], "location": str(run_dir / "checkpoints")}
    return spec
