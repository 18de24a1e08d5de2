"""Reads a job's file for a local run, and refuses invalid files with the API server's messages."""

import difflib
import importlib.util
import os
import re
import shutil
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from . import KIND, PipeTrainingJob
from .job import TRAINER_CONTAINER
from .labels import FieldError
from .schema import root_schema, without_nulls
from .validate import validate_manifest, with_name

#: Command that the trainer's image runs.
TRAINER = (sys.executable, "-m", "pipetransformer")
#: File name that stands for standard input.
STANDARD_INPUT = Path("-")

_TAG = "tag:yaml.org,2002:"
#: YAML types that JSON does not have, and PyYAML's `=`.
_NOT_IN_JSON = {f"{_TAG}{name}" for name in ("timestamp", "binary", "set", "omap", "pairs", "value")}
_NUMBERS = {
    f"{_TAG}int": r"[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)",
    f"{_TAG}float": r"[-+]?((\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
}


class _Loader(yaml.SafeLoader):
    """Reads scalars as kubectl does.

    PyYAML's own loader follows YAML 1.1. It would read 3e-4 as text, 12:30 as a base-60 number and 2024-01-01 as a
    date."""

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
    """The file is not a valid job. `errors` name the fields."""

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = errors


@dataclass(frozen=True)
class Document:
    """One YAML document. `source` says where it is, such as `jobs.yaml, document 2`."""

    source: str
    content: Any

    @property
    def kind(self) -> str:
        """Kind of the object; empty if it has none."""
        return str(self.content.get("kind") or "") if isinstance(self.content, dict) else ""

    @property
    def name(self) -> str:
        """Name of the object; empty if the API server generates it, or without one."""
        metadata = self.content.get("metadata") if isinstance(self.content, dict) else None
        return str(metadata.get("name") or "") if isinstance(metadata, dict) else ""


def read_documents(file: Path) -> list[Document]:
    """The YAML documents of a file, or of standard input for `-`. Empty documents are left out.

    Raises:
        InvalidManifest: the file is not YAML.
        OSError: it cannot be read.
    """
    try:
        text = sys.stdin.read() if file == STANDARD_INPUT else _text(file)
        contents = list(yaml.load_all(text, Loader=_Loader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidManifest([FieldError(_called(file), f"is no YAML: {error}")]) from error
    if len(contents) == 1:
        return [Document(_called(file), contents[0])]
    return [
        Document(f"{_called(file)}, document {number}", content)
        for number, content in enumerate(contents, start=1)
        if content is not None
    ]


def parse_value(text: str) -> Any:
    """Reads a value as it would be read from a manifest.

    Raises:
        ValueError: it is not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is no YAML: {error}") from error


def _called(file: Path) -> str:
    return "standard input" if file == STANDARD_INPUT else str(file)


def _text(file: Path) -> str:
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: name a YAML file in it")
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}{similar_path(file)}")
    return file.read_text()


def similar_path(path: Path) -> str:
    """Suggests the existing path closest to a mistyped one; empty if none is close."""
    folder = path.parent
    if not folder.is_dir():
        return f": there is no folder {folder}{similar_path(folder)}"
    try:
        names = [other.name for other in folder.iterdir()]
    except OSError:  # it cannot be read
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f": did you mean {folder / close[0]}?" if close else ""


def read_job(file: Path, run_dir: Path) -> PipeTrainingJob:
    """Reads the job of a YAML file that holds exactly one, and adapts it to this machine like `local_job`."""
    return local_job(local_manifest(_only(file)), run_dir)


def local_manifest(document: Document) -> dict[str, Any]:
    """The manifest of a job that trains on this machine, with a name. It needs no `podTemplate` and no accelerator.

    Raises:
        InvalidManifest: it is not a valid job.
    """
    content = document.content
    if isinstance(content, dict) and isinstance(spec := content.get("spec"), dict):
        template = spec.get("podTemplate") or {"spec": {"containers": [{"name": TRAINER_CONTAINER}]}}
        content = {**content, "spec": {**spec, "acceleratorResource": "", "podTemplate": template}}
    return with_name(checked(content, document.source))


def local_job(manifest: Mapping[str, Any], run_dir: Path) -> PipeTrainingJob:
    """Adapts the job of a manifest from `local_manifest` to this machine.

    The job writes only to `run_dir`, and its checkpoints to `run_dir/checkpoints`, whatever its manifest says. Mounted
    paths of a cluster do not exist here, and a URL may belong to a cluster's job. The job always keeps checkpoints, so
    that it can be resumed. The container's command runs in the current folder, with the values in its `env`. Before
    the run, set variables that a cluster would take from elsewhere, such as a Secret.

    Raises:
        InvalidManifest: the job cannot run here.
    """
    metadata = {**manifest["metadata"], "uid": str(uuid.uuid4())}
    job = PipeTrainingJob.from_manifest(
        {**manifest, "metadata": metadata, "spec": _localised(manifest["spec"], run_dir), "status": {}}
    )
    if errors := [*_never_started(job), *_container_errors(job)]:
        raise InvalidManifest(errors)
    return job


def worker_command(job: PipeTrainingJob) -> list[str]:
    """Command line of a worker: the trainer container's `command`, by default its image's command, and its `args`."""
    container = job.spec.pod_template.trainer().model_extra or {}
    return [*(container.get("command") or TRAINER), *(container.get("args") or ())]


def worker_environment(job: PipeTrainingJob) -> dict[str, str]:
    """Variables that the trainer container's `env` adds to this process's environment."""
    variables = (job.spec.pod_template.trainer().model_extra or {}).get("env") or ()
    return {one["name"]: one.get("value", "") for one in variables if "valueFrom" not in one}


def _never_started(job: PipeTrainingJob) -> list[FieldError]:
    """Refuses jobs that would never start here: in a cluster a user or another controller starts them."""
    errors = []
    if job.spec.suspend:
        errors.append(FieldError("spec.suspend", "nobody resumes a local run: it must be false"))
    if not job.spec.managed:
        errors.append(FieldError("spec.managedBy", f"{job.spec.managed_by} does not manage a local run: leave it out"))
    return errors


def _container_errors(job: PipeTrainingJob) -> list[FieldError]:
    """Errors that a cluster's dry run of a pod would find, or that the image would rule out."""
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
        errors.append(FieldError(f"{path}.command", f"{program} is not found on this machine"))
    if not container.get("command") and importlib.util.find_spec("pipetransformer") is None:
        errors.append(FieldError(path, "a local run needs the trainer here: pip install ./trainer_image"))
    return errors


def search_path() -> str:
    """Folders to search for a worker's program. This interpreter's folder is first, so that `python` is this one."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def read_manifest(file: Path) -> dict[str, Any]:
    """The manifest of the one job in a YAML file, or in standard input for `-`.

    Raises:
        InvalidManifest: the file is not a valid job.
        OSError: it cannot be read.
    """
    document = _only(file)
    return checked(document.content, document.source)


def _only(file: Path) -> Document:
    documents = read_documents(file)
    if len(documents) == 1:
        return documents[0]
    raise InvalidManifest([FieldError(_called(file), f"must hold one {KIND}, and holds {len(documents)} documents")])


def checked(manifest: Any, source: str) -> dict[str, Any]:
    """The manifest of a valid job, as the API server reads it.

    Raises:
        InvalidManifest: it is not a valid job; the errors name its fields, or `source`.
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
    checkpoint = {**(spec.get("checkpoint") or {}), "location": str(run_dir / "checkpoints")}
    return {**spec, "output": {"location": str(run_dir)}, "checkpoint": checkpoint}
