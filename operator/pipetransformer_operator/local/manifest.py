"""Reads a job's file for a local run and refuses it with the words that the API server would use."""

import importlib.util
import os
import re
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import yaml

from ..api import PipeTrainingJob
from ..api.labels import FieldError
from ..api.schema import root_schema, without_nulls
from ..api.validate import validate_manifest, with_name

#: What the trainer's image runs.
TRAINER = (sys.executable, "-m", "pipetransformer")

_TAG = "tag:yaml.org,2002:"
#: Types of YAML that JSON has none for, and PyYAML's `=`.
_NOT_IN_JSON = {f"{_TAG}{name}" for name in ("timestamp", "binary", "set", "omap", "pairs", "value")}
_NUMBERS = {
    f"{_TAG}int": r"[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)",
    f"{_TAG}float": r"[-+]?((\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
}


class _Loader(yaml.SafeLoader):
    """Reads scalars as kubectl does. PyYAML's own reader has YAML 1.1's: 3e-4 would be text, 12:30 a number of base 60,
    and 2024-01-01 a date."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag not in {*_NUMBERS, *_NOT_IN_JSON}]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {
        tag: construct for tag, construct in yaml.SafeLoader.yaml_constructors.items() if tag not in _NOT_IN_JSON
    }


for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"^({_pattern})$"), list("-+.0123456789"))


class InvalidManifest(Exception):
    """The file is no valid job; `errors` name the fields."""

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = errors


def read_job(file: Path, run_dir: Path) -> PipeTrainingJob:
    """The job of a YAML file, made fit for this machine.

    It writes to `run_dir` alone, checkpoints to `run_dir/checkpoints`, wherever its manifest says: mounted paths of a
    cluster do not exist here, and what is at a URL may be a cluster's job's. Processes need no accelerator. A
    container's command runs in the present folder, with what its `env` says in so many words; what comes from elsewhere
    in a cluster is to be set here before.

    Raises:
        InvalidManifest: the file is no valid job.
        OSError: it cannot be read.
    """
    manifest = with_name(read_manifest(file))
    metadata = {**manifest["metadata"], "uid": str(uuid.uuid4())}
    job = PipeTrainingJob.from_manifest(
        {**manifest, "metadata": metadata, "spec": _localised(manifest["spec"], run_dir), "status": {}}
    )
    if errors := [*_never_started(job), *_container_errors(job)]:
        raise InvalidManifest(errors)
    return job


def worker_command(job: PipeTrainingJob) -> list[str]:
    """What a worker's process runs: the trainer container's `command`, by default what its image runs, and `args`."""
    container = job.spec.pod_template.trainer().model_extra or {}
    return [*(container.get("command") or TRAINER), *(container.get("args") or ())]


def worker_environment(job: PipeTrainingJob) -> dict[str, str]:
    """What the trainer container's `env` adds to this process's own."""
    variables = (job.spec.pod_template.trainer().model_extra or {}).get("env") or ()
    return {one["name"]: one.get("value", "") for one in variables if "valueFrom" not in one}


def _never_started(job: PipeTrainingJob) -> list[FieldError]:
    """In a cluster such a job waits for somebody; here there is nobody else."""
    errors = []
    if job.spec.suspend:
        errors.append(FieldError("spec.suspend", "nobody resumes a local run: it must be false"))
    if not job.spec.managed:
        errors.append(FieldError("spec.managedBy", f"{job.spec.managed_by} does not manage a local run: leave it out"))
    return errors


def _container_errors(job: PipeTrainingJob) -> list[FieldError]:
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
    for number, one in enumerate(container.get("env") or ()):
        named = isinstance(one, dict) and isinstance(one.get("name"), str)
        if not named or not isinstance(one.get("value", ""), str):
            errors.append(FieldError(f"{path}.env[{number}]", "must have a name and, as its value, a string"))
    if not errors and shutil.which(program := worker_command(job)[0], path=search_path()) is None:
        errors.append(FieldError(f"{path}.command", f"{program} is no program of this machine"))
    if not container.get("command") and importlib.util.find_spec("pipetransformer") is None:
        errors.append(FieldError(path, "a local run needs the trainer here: pip install ./trainer_image"))
    return errors


def search_path() -> str:
    """Where a worker's program is looked for: beside this interpreter first, so that `python` is this one."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def read_manifest(file: Path) -> dict[str, Any]:
    """The manifest of one job, as it stands in a YAML file. Raises as `read_job`."""
    try:
        manifest = yaml.load(file.read_text(), Loader=_Loader)
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
    spec = {**spec, "output": {"location": str(run_dir)}}
    if "checkpoint" in spec:
        spec["checkpoint"] = {**spec["checkpoint"], "location": str(run_dir / "checkpoints")}
    return spec
