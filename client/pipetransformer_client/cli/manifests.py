"""Reads jobs by the arguments `FILE`, `--name` and `--set`, which the commands `run`, `plan` and `submit` share."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pipetransformer_contract.api import KIND
from pipetransformer_contract.api.field_error import FieldError
from pipetransformer_contract.api.manifest import Document, InvalidManifest, checked, read_documents

from .completion import complete_field
from .set_fields import with_fields

File = Annotated[Path, typer.Argument(help=f"YAML of {KIND}s, or - for standard input.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the job, if the file holds several.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set a field of the job, such as training.epochs=3. Can be repeated.",
        autocompletion=complete_field,
    ),
]


def one_job(file: Path, name: str | None, settings: Sequence[str] | None) -> Document:
    """Reads the job for a command that takes one job. Objects of other kinds in the file are ignored.

    Args:
        file: the file, or `-` for standard input.
        name: name of the job; None if the file holds only one.
        settings: values of `--set`.

    Raises:
        InvalidManifest: the file holds no job, or several and `name` chooses none.
        OSError: the file cannot be read.
    """
    documents = read_documents(file)
    found = documents if len(documents) == 1 else [one for one in documents if one.kind == KIND]
    if name is not None:
        found = _called(file, found, name)
    if len(found) == 1:
        return _set(found[0], settings)
    if not found:
        raise InvalidManifest([FieldError(str(file), f"must hold a {KIND}")])
    raise InvalidManifest([FieldError(str(file), f"holds {len(found)} jobs ({_names(found)}): choose one with --name")])


def all_jobs(file: Path, name: str | None, settings: Sequence[str] | None) -> list[dict[str, Any]]:
    """Reads and checks the manifests of all jobs to submit. The arguments are those of `one_job`; without a `name` all
    jobs of the file are submitted.

    Raises:
        InvalidManifest: a job is not valid, the file holds no job, or it holds other objects and `name` is not given.
        OSError: the file cannot be read.
    """
    found = read_documents(file)
    if name is not None:
        found = _called(file, found, name)
    others = [one for one in found if one.kind not in ("", KIND)]
    if len(found) > 1 and others:
        words = f"is not a {KIND}. Create it with kubectl apply, or choose a job with --name"
        raise InvalidManifest([FieldError(one.source, f"{one.kind} {one.name} {words}") for one in others])
    if not found:
        raise InvalidManifest([FieldError(str(file), f"must hold a {KIND}")])
    manifests, errors = [], []
    for one in [_set(one, settings) for one in found]:
        try:
            manifests.append(checked(one.content, one.source))
        except InvalidManifest as error:
            fields = len(found) > 1 and isinstance(one.content, dict)
            errors += [
                replace(wrong, path=f"{one.source}: {wrong.path}") if fields else wrong for wrong in error.errors
            ]
    if errors:
        raise InvalidManifest(errors)
    return manifests


def _set(document: Document, settings: Sequence[str] | None) -> Document:
    return replace(document, content=with_fields(document.content, settings or ()))


def _called(file: Path, documents: Sequence[Document], name: str) -> list[Document]:
    jobs = [one for one in documents if one.kind == KIND]
    found = [one for one in jobs if one.name == name]
    if len(found) == 1:
        return found
    words = f"holds {len(found)} jobs" if found else "holds no job"
    raise InvalidManifest([FieldError("--name", f"{file} {words} called {name}; it has {_names(jobs) or 'none'}")])


def _names(documents: Sequence[Document]) -> str:
    return ", ".join(one.name or "one without a name" for one in documents)
