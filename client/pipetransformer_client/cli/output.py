"""Prints objects as JSON or YAML, for programs (`--output`)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from pipetransformer_client.job import Job

from .options import Format


def print_jobs(jobs: Sequence[Job], output: Format) -> None:
    """Prints jobs as a `List`, as kubectl does."""
    _print_list([job.manifest for job in jobs], output)


def print_manifests(manifests: Sequence[Mapping[str, Any]], output: Format) -> None:
    """Prints one object by itself, so that a program can read it, and several as a `List`."""
    if len(manifests) == 1:
        print_object(manifests[0], output)
    else:
        _print_list(manifests, output)


def _print_list(manifests: Sequence[Mapping[str, Any]], output: Format) -> None:
    print_object({"apiVersion": "v1", "kind": "List", "items": list(manifests)}, output)


def print_object(value: Mapping[str, Any], output: Format) -> None:
    """Prints a JSON-able object as JSON or YAML."""
    text = json.dumps(value, indent=2)
    if output is Format.JSON:
        print(text)
    else:  # PyYAML knows no enums
        print(yaml.safe_dump(json.loads(text), sort_keys=False, allow_unicode=True), end="")
