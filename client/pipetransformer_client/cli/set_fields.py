"""`--set field=value`: sets fields of a manifest before it is checked. The CRD's schema says which fields exist."""

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipetransformer_contract.api.field_error import FieldError
from pipetransformer_contract.api.manifest import InvalidManifest, parse_value
from pipetransformer_contract.api.schema import Schema, root_schema

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
#: Fields of `metadata` that can be set. The CRD's schema does not describe them.
_METADATA: Schema = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("name", "generateName", "namespace")},
        "labels": _TEXTS,
        "annotations": _TEXTS,
    },
}
#: A name, followed by any number of indices such as `[0]`. In the name `\.` stands for a dot.
_PART = re.compile(r"((?:[^.\\\[\]]|\\.)+)((?:\[\d+\])*)")
_MAX_SUGGESTIONS = 3


def with_fields(manifest: Any, settings: Sequence[str]) -> Any:
    """Returns the manifest with each `field=value` set, in order. Values are YAML; an empty one removes the field.

    A path begins below `spec`, or with `metadata`. Examples: `training.epochs=3`,
    `podTemplate.spec.containers[0].image=trainer:2`, `metadata.labels.kueue\\.x-k8s\\.io/queue-name=team`.

    Raises:
        InvalidManifest: a field does not exist, or a value is not YAML.
    """
    if not settings or not isinstance(manifest, dict):
        return manifest
    changed = copy.deepcopy(manifest)
    errors = []
    for setting in settings:
        path, equals, value = setting.partition("=")
        try:
            if not equals:
                raise ValueError("must be field=value")
            steps = _steps(path)
            _check(steps)
            _put(changed, steps, parse_value(value))
        except ValueError as error:
            errors.append(FieldError(f"--set {setting}", str(error)))
    if errors:
        raise InvalidManifest(errors)
    return changed


def field_paths() -> list[str]:
    """Paths of all fields that hold a value, as `--set` takes them."""
    return [*_leaves(root_schema()["properties"]["spec"], ""), *_leaves(_METADATA, "metadata")]


def _steps(path: str) -> list[str | int]:
    """Splits a path into names and indices. The first one is always `spec` or `metadata`.

    Raises:
        ValueError: the text is not a path.
    """
    steps: list[str | int] = []
    at = 0
    while match := _PART.match(path, at):
        steps.append(re.sub(r"\\(.)", r"\1", match[1]))
        steps += [int(index) for index in re.findall(r"\d+", match[2])]
        at = match.end()
        if at == len(path):
            return steps if steps[0] in ("spec", "metadata") else ["spec", *steps]
        if path[at] != ".":
            break
        at += 1
    raise ValueError("must name a field, such as training.epochs")


def _check(steps: Sequence[str | int]) -> None:
    """Checks that the schema has a field.

    Raises:
        ValueError: the field does not exist; the message suggests similar ones.
    """
    schema: Schema = _METADATA if steps[0] == "metadata" else root_schema()["properties"]["spec"]
    for depth, step in enumerate(steps[1:], start=1):
        parent = _shown(steps[:depth]) or "spec"
        if isinstance(step, int):
            if schema and "items" not in schema and not _is_open(schema):
                raise ValueError(f"{parent} is not a list")
            schema = schema.get("items", {})
        elif step in schema.get("properties", {}):
            schema = schema["properties"][step]
        elif "additionalProperties" in schema:
            schema = schema["additionalProperties"]
        elif not schema or _is_open(schema):
            return  # free-form, such as `options`
        elif "items" in schema:
            raise ValueError(f"{parent} is a list: add an index, such as {parent}[0]")
        elif "properties" not in schema:
            raise ValueError(f"{parent} is not an object, so it has no fields")
        else:
            raise ValueError(f"there is no field {_shown(steps[: depth + 1])}{_meant(steps[: depth + 1], schema)}")


def _is_open(schema: Schema) -> bool:
    return bool(schema.get("x-kubernetes-preserve-unknown-fields"))


def _meant(steps: Sequence[str | int], schema: Schema) -> str:
    """Words that suggest fields with a similar name: of the same object, otherwise of any object; empty without one."""
    parent, wrong = _shown(steps[:-1]), _plain(str(steps[-1]))
    beside = {_plain(name): f"{parent}.{name}".removeprefix(".") for name in schema["properties"]}
    found = [beside[name] for name in difflib.get_close_matches(wrong, beside, n=_MAX_SUGGESTIONS)]
    if not found:
        paths = field_paths()
        ends = {_plain(path.rpartition(".")[2]) for path in paths}
        close = difflib.get_close_matches(wrong, ends, n=1)
        found = [path for path in paths if _plain(path.rpartition(".")[2]) in close]
    return f": did you mean {' or '.join(found[:_MAX_SUGGESTIONS])}?" if found else ""


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _shown(steps: Sequence[str | int]) -> str:
    """The path as a user writes it, without `spec`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".").removeprefix("spec").removeprefix(".")


def _leaves(schema: Schema, path: str) -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        inner = f"{path}.{name}".removeprefix(".")
        if "properties" in field:
            yield from _leaves(field, inner)
        else:
            yield inner


def _put(manifest: dict[str, Any], steps: Sequence[str | int], value: Any) -> None:
    """Sets a value. Objects and lists that contain it are made if they do not exist.

    Raises:
        ValueError: an index is past the end of its list.
    """
    node: Any = manifest
    for step, following in pairwise(steps):
        inner = _at(node, step)
        wanted = list if isinstance(following, int) else dict
        if not isinstance(inner, wanted):
            inner = wanted()
            _assign(node, step, inner)
        node = inner
    _assign(node, steps[-1], value)


def _at(node: Any, step: str | int) -> Any:
    if isinstance(step, int):
        return node[step] if step < len(node) else None
    assert isinstance(node, Mapping)
    return node.get(step)


def _assign(node: Any, step: str | int, value: Any) -> None:
    if isinstance(step, int) and step == len(node):
        node.append(value)
    elif isinstance(step, int) and step > len(node):
        raise ValueError(f"the list has {len(node)} entries: the next is [{len(node)}]")
    else:
        node[step] = value
