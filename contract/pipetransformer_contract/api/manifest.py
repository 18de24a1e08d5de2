"""Reads manifests of jobs from files, refuses invalid ones with the API server's messages, and adapts jobs to a local
run."""

import difflib
import importlib.util
import json
import math
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
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from . import KIND, PipeTrainingJob
from .field_error import FieldError
from .job import TRAINER_CONTAINER
from .schema import root_schema, without_nulls
from .validate import validate_manifest, with_name

#: Default command of a worker in a local run, as in the trainer's image.
TRAINER = (sys.executable, "-m", "pipetransformer")
#: File name that stands for standard input.
STANDARD_INPUT = Path("-")

_TIME_TO_LIVE = "ttlSecondsAfterFinished"
_TAG = "tag:yaml.org,2002:"
#: YAML types that are not in JSON, and PyYAML's type for a `=`.
_NOT_IN_JSON = {f"{_TAG}{name}" for name in ("timestamp", "binary", "set", "omap", "pairs", "value")}
_NUMBERS = {
    f"{_TAG}int": r"[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)",
    f"{_TAG}float": r"[-+]?((\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
}


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads numbers and texts as kubectl does, and refuses what JSON does not have.

    PyYAML's own loader follows YAML 1.1. It would read 3e-4 as text, 12:30 as a base-60 number and 2024-01-01 as a
    date. Of two values of one key it would keep the last."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag not in {*_NUMBERS, *_NOT_IN_JSON}]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {
        tag: construct for tag, construct in yaml.SafeLoader.yaml_constructors.items() if tag not in _NOT_IN_JSON
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        found: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in found:
                raise ComposerError(None, None, f"found the key {key.value} twice", key.start_mark)
            found.add(key.value)
        return node

    def construct_finite(self, node: yaml.ScalarNode) -> int | float:
        number = self.construct_yaml_float(node)
        if not math.isfinite(number):
            raise ConstructorError(None, None, f"found {node.value}, but JSON has only finite numbers", node.start_mark)
        return int(number) if number.is_integer() else number  # kubectl sends 1e5 as 100000, and 2.0 as 2


for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"^({_pattern})$"), list("-+.0123456789"))
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_finite)


class InvalidManifest(Exception):
    """A manifest is not a valid job.

    Attributes:
        errors: the errors, each with the path of its field.
    """

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = errors


@dataclass(frozen=True)
class Document:
    """One YAML document of a file.

    Attributes:
        source: where the document is, for errors, such as `jobs.yaml, document 2`.
        content: its content as Python objects.
    """

    source: str
    content: Any

    @property
    def kind(self) -> str:
        """Kind of the object; empty if it has none."""
        return str(self.content.get("kind") or "") if isinstance(self.content, dict) else ""

    @property
    def name(self) -> str:
        """Name of the object; empty if it has none, or only a `generateName`."""
        metadata = self.content.get("metadata") if isinstance(self.content, dict) else None
        return str(metadata.get("name") or "") if isinstance(metadata, dict) else ""


def read_documents(file: Path) -> list[Document]:
    """The YAML documents of a file, or of standard input for `-`, and the objects of a `List`. Empty documents are left
    out.

    Raises:
        InvalidManifest: the file is not YAML.
        OSError: the file cannot be read.
    """
    try:
        contents = _parsed(sys.stdin.read() if file == STANDARD_INPUT else _text(file))
    except ValueError as error:
        raise InvalidManifest([FieldError(_name_of(file), f"is not YAML: {error}")]) from error
    contents = [one for content in contents for one in _items(content)]
    if len(contents) == 1:
        return [Document(_name_of(file), contents[0])]
    return [
        Document(f"{_name_of(file)}, document {number}", content)
        for number, content in enumerate(contents, start=1)
        if content is not None
    ]


def _items(content: Any) -> list[Any]:
    """The objects of a `List`, as `kubectl get` and `pipetransformer list` print one; otherwise the content itself."""
    items = content.get("items") if isinstance(content, dict) and content.get("kind") == "List" else None
    return items if isinstance(items, list) else [content]


def parse_value(text: str) -> Any:
    """Reads a YAML value by the rules for manifests.

    Raises:
        ValueError: the text is not YAML.
    """
    try:
        values = _parsed(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not YAML: {error}") from error
    if len(values) > 1:
        raise ValueError(f"{text!r} holds {len(values)} values")
    return values[0] if values else None


def _parsed(text: str) -> list[Any]:
    """Parses YAML documents that JSON can express.

    Raises:
        ValueError: the text is not YAML, a value contains itself, or values are nested too deeply.
    """
    try:
        contents = list(yaml.load_all(text, Loader=_Loader))
        json.dumps(contents)  # fails for an anchor that contains its own alias, which YAML allows
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error
    return contents


def _name_of(file: Path) -> str:
    return "standard input" if file == STANDARD_INPUT else str(file)


def _text(file: Path) -> str:
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: name a YAML file in it")
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}{similar_path(file)}")
    return file.read_text()


def similar_path(path: Path) -> str:
    """Words that suggest an existing path in place of a mistyped one; empty if no name is close."""
    folder = path.parent
    if not folder.is_dir():
        return f": there is no folder {folder}{similar_path(folder)}"
    try:
        names = [other.name for other in folder.iterdir()]
    except OSError:  # the folder cannot be read
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f": did you mean {folder / close[0]}?" if close else ""


def read_job(file: Path, run_dir: Path) -> PipeTrainingJob:
    """Reads the only job of a YAML file, and adapts it to this machine as `local_job` does."""
    return local_job(local_manifest(_only(file)), run_dir)


def local_manifest(document: Document) -> dict[str, Any]:
    """Checks a manifest for a local run. Adds a name if there is only a `generateName`, and a `podTemplate` if missing.

    A local run needs no accelerator, so this sets `acceleratorResource` to an empty text.

    Raises:
        InvalidManifest: the manifest is not a valid job.
    """
    content = document.content
    if isinstance(content, dict) and isinstance(spec := content.get("spec"), dict):
        template = spec.get("podTemplate") or {"spec": {"containers": [{"name": TRAINER_CONTAINER}]}}
        content = {**content, "spec": {**spec, "acceleratorResource": "", "podTemplate": template}}
    return with_name(checked(content, document.source))


def local_job(manifest: Mapping[str, Any], run_dir: Path) -> PipeTrainingJob:
    """Adapts the job of a manifest from `local_manifest` to this machine.

    The job writes its results to `run_dir`, and its checkpoints to `run_dir/checkpoints`, whatever its manifest says.
    Volumes of a cluster do not exist on this machine, and a URL may belong to a cluster's job. The job always keeps
    checkpoints, so that it can be resumed. The container's command runs in the current folder, with the variables of
    its `env` that have a value. Variables from elsewhere, such as a Secret, must be set in this process's environment.

    Raises:
        InvalidManifest: the job cannot run on this machine.
    """
    metadata = {**manifest["metadata"], "uid": str(uuid.uuid4())}
    job = PipeTrainingJob.from_manifest(
        {**manifest, "metadata": metadata, "spec": _localised(manifest["spec"], run_dir), "status": {}}
    )
    if errors := [*_never_started(job), *_container_errors(job)]:
        raise InvalidManifest(errors)
    return job


def worker_command(job: PipeTrainingJob) -> list[str]:
    """Command line of a worker: `command` of the trainer container (by default `TRAINER`), followed by its `args`."""
    container = job.spec.pod_template.trainer().model_extra or {}
    return [*(container.get("command") or TRAINER), *(container.get("args") or ())]


def worker_environment(job: PipeTrainingJob) -> dict[str, str]:
    """Variables of the trainer container's `env` that have a value. They are added to this process's environment."""
    variables = (job.spec.pod_template.trainer().model_extra or {}).get("env") or ()
    return {one["name"]: one.get("value", "") for one in variables if "valueFrom" not in one}


def _never_started(job: PipeTrainingJob) -> list[FieldError]:
    """Errors of a job that would never start in a local run. On a cluster a user or another controller starts it."""
    errors = []
    try:
        job.spec.starting_layout()
    except ValueError as error:
        errors.append(FieldError("spec.elasticPolicy.maxWorkers", str(error)))
    if job.spec.suspend:
        errors.append(FieldError("spec.suspend", "must be false, because a suspended job never starts in a local run"))
    if not job.spec.managed:
        errors.append(
            FieldError("spec.managedBy", f"{job.spec.managed_by} does not start jobs in a local run: leave it out")
        )
    return errors


def _container_errors(job: PipeTrainingJob) -> list[FieldError]:
    """Errors of the trainer container. On a cluster the API server refuses the pod, or the image prevents them."""
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
    """Folders to search for a worker's program. The first is that of this interpreter, so that `python` finds it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def read_manifest(file: Path) -> dict[str, Any]:
    """Reads and checks the manifest of the only job in a YAML file, or in standard input for `-`.

    Raises:
        InvalidManifest: the file does not hold one valid job.
        OSError: the file cannot be read.
    """
    document = _only(file)
    return checked(document.content, document.source)


def _only(file: Path) -> Document:
    documents = read_documents(file)
    if len(documents) == 1:
        return documents[0]
    raise InvalidManifest([FieldError(_name_of(file), f"must hold one {KIND}, and holds {len(documents)} documents")])


def checked(manifest: Any, source: str) -> dict[str, Any]:
    """Checks a manifest, and returns it without null fields, as the API server reads it.

    Args:
        manifest: the content of a document.
        source: where it is, for errors.

    Raises:
        InvalidManifest: the manifest is not a valid job.
    """
    if not isinstance(manifest, dict):
        raise InvalidManifest([FieldError(source, f"must hold one {KIND}")])
    read: dict[str, Any] = without_nulls(root_schema(), manifest)
    if isinstance(metadata := read.get("metadata"), dict):
        read["metadata"] = {key: value for key, value in metadata.items() if value is not None}
    if errors := validate_manifest(read):
        raise InvalidManifest(errors)
    return read


def _localised(spec: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """The spec with its locations in the run's folder. A local job ends with its run, so it has no time to live."""
    checkpoint = {**(spec.get("checkpoint") or {}), "location": str(run_dir / "checkpoints")}
    policy = {name: value for name, value in (spec.get("runPolicy") or {}).items() if name != _TIME_TO_LIVE}
    return {**spec, "output": {"location": str(run_dir)}, "checkpoint": checkpoint, "runPolicy": policy}
