"""Every bound of every field of the spec, and of the channel's messages, each with an object that breaks it: made from
the schema itself.

A field that gets a bound gets its row here without anybody's doing.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from pipetransformer_contract.api.schema import root_schema, structural
from tests.testkit.operator.builders import make_job

Schema = dict[str, Any]
#: Steps into an object, an array's first item, or a map's only value.
Path = tuple[str | int, ...]
KEY = "key"
_WRONG_TYPE = {"string": 1, "integer": "x", "number": "x", "boolean": "x", "array": "x", "object": "x"}


@dataclass(frozen=True)
class Violation:
    """A manifest, or a message, that breaks the bound `keyword` of the field `path`, such as `spec.training.epochs`."""

    path: str
    keyword: str
    manifest: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.path} {self.keyword}"


def violations() -> Iterator[Violation]:
    """One for each bound below spec."""
    for path, keyword, spec in _broken_bodies(root_schema()["properties"]["spec"], make_job().manifest()["spec"]):
        yield Violation(_dotted(("spec", *path)), keyword, make_job().manifest() | {"spec": spec})


def message_violations(kind: type[BaseModel], message: dict[str, Any]) -> Iterator[Violation]:
    """One for each bound of a message of the channel; `message` keeps them all."""
    for path, keyword, body in _broken_bodies(structural(kind, defaults=False), message):
        yield Violation(".".join(map(str, path)), keyword, body)


def _broken_bodies(schema: Schema, body: dict[str, Any]) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """(path of the field, keyword, a body that breaks that bound alone)."""
    for path, keyword, value in _broken(schema, ()):
        broken = copy.deepcopy(body)
        _put(broken, schema, path, value)
        yield (path if " " not in keyword else (*path, keyword.split()[1])), keyword, broken


def _broken(schema: Schema, path: Path) -> Iterator[tuple[Path, str, Any]]:
    """(path, keyword, value that breaks it) of this schema and all in it."""
    if path:
        yield from ((path, keyword, value) for keyword, value in _values(schema))
    for name, field in schema.get("properties", {}).items():
        yield from _broken(field, (*path, name))
    if "items" in schema:
        yield from _broken(schema["items"], (*path, 0))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _broken(schema["additionalProperties"], (*path, KEY))


def _values(schema: Schema) -> Iterator[tuple[str, Any]]:
    if "type" in schema:
        yield "type", _WRONG_TYPE[schema["type"]]
    for keyword, step in (("minimum", -1), ("maximum", 1)):
        if keyword in schema:
            exclusive = schema.get(f"exclusive{keyword.capitalize()}")
            yield keyword, schema[keyword] if exclusive else schema[keyword] + step
    if schema.get("minLength"):
        yield "minLength", "x" * (schema["minLength"] - 1)
    if "maxLength" in schema:
        yield "maxLength", "x" * (schema["maxLength"] + 1)
    if "enum" in schema:
        yield "enum", "NoSuch"
    if "pattern" in schema:
        yield "pattern", "!!"
    if schema.get("minItems"):
        yield "minItems", []
    if "maxItems" in schema:
        yield "maxItems", [_sample(schema["items"])] * (schema["maxItems"] + 1)
    if "maxProperties" in schema:
        value = _sample(schema["additionalProperties"])
        yield "maxProperties", {f"key-{number}": value for number in range(schema["maxProperties"] + 1)}
    for name in schema.get("required", ()):
        yield f"required {name}", {key: value for key, value in _sample(schema).items() if key != name}


def _sample(schema: Schema) -> Any:
    """A value that fits."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {name: _sample(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [_sample(schema["items"])] * schema.get("minItems", 0)
        case "string":
            return "x" * schema.get("minLength", 1)
        case "boolean":
            return False
        case _:
            return schema.get("minimum", 0) + 1


def _put(node: Any, schema: Schema, path: Path, value: Any) -> None:
    """Sets `path` below `node`; what is on the way there is made where it is missing."""
    step, rest = path[0], path[1:]
    inner = schema["items"] if step == 0 else schema.get("properties", {}).get(step, schema.get("additionalProperties"))
    if step == 0 and not node:
        node.append(_sample(inner))
    if not rest:
        node[step] = value
        return
    if step != 0 and step not in node:
        node[step] = _sample(inner)
    _put(node[step], inner, rest, value)


def _dotted(path: Path) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
