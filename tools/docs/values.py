"""Renders docs/values.md: the comment of each value in values.yaml, with its type in values.schema.json."""

import json
from collections.abc import Iterator
from typing import Any

import yaml

from tools.devcluster.layout import REPOSITORY
from tools.docs.markdown import GENERATED, code, table

CHART = REPOSITORY / "charts" / "pipetransformer"
_INTRODUCTION = """# Helm values

Values of the chart `charts/pipetransformer`. Helm refuses values that are not listed here.
"""


def rendered() -> str:
    """The page."""
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    rows = []
    for path, comment in comments(text):
        value, kind = _at(yaml.safe_load(text), schema, path)
        group = "properties" in kind
        if not kind or (group and not comment):
            continue  # inside a free-form map, or a group without a comment
        rows.append([code(".".join(path)), "" if group else code(json.dumps(value)), _type(kind, schema), comment])
    return f"{GENERATED}{_INTRODUCTION}\n" + table(("value", "default", "type", "meaning"), rows)


def comments(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each key of the file in order, with the comment above it."""
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
        elif not stripped or stripped.startswith("- "):  # entries of a list belong to its key
            comment = []
        else:
            depth = (len(line) - len(line.lstrip())) // 2
            path = [*path[:depth], stripped.partition(":")[0]]
            yield tuple(path), " ".join(comment)
            comment = []


def _at(value: Any, schema: Any, path: tuple[str, ...]) -> tuple[Any, Any]:
    """The value at a path and its schema, which is empty inside a free-form map."""
    root = schema
    for name in path:
        value = value[name]
        schema = _resolved(schema, root).get("properties", {}).get(name, {})
    return value, _resolved(schema, root)


def _resolved(schema: Any, root: Any) -> Any:
    return root["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _type(kind: Any, root: Any) -> str:
    if "enum" in kind:
        return "one of " + ", ".join(map(code, kind["enum"]))
    if kind.get("type") == "array":
        return f"list of {_type(_resolved(kind.get('items', {}), root), root) or 'value'}s"
    return str(kind.get("type", ""))
