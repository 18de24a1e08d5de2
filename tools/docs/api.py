"""Renders docs/api.md: every field of a `PipeTrainingJob`, from the CRD's schema."""

import inspect
import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from pipetransformer_contract.api import GROUP, KIND, VERSION
from pipetransformer_contract.api.rules import IMMUTABILITY_RULES
from pipetransformer_contract.api.schema import Schema, root_schema
from pipetransformer_contract.api.status import ConditionType, ResizePhase, State
from pipetransformer_contract.choose import OnPack, Packing
from pipetransformer_contract.messages import ResizeReason
from tools.docs.markdown import GENERATED, code, table

#: Larger maximums only say that the number fits, so they are left out.
_LARGE = 2**31 - 1
_WORDS = (State, ConditionType, ResizePhase, ResizeReason, OnPack, Packing)
_INTRODUCTION = f"""# {KIND}

`{GROUP}/{VERSION}`, short name `ptj`, namespaced. `kubectl explain ptj.spec` says the same on a cluster. The API
server fills in the defaults and refuses what does not fit, with the path of the field; `pipetransformer run`, `plan`
and `submit` refuse it with the same words before. What the tables call *fixed* cannot change while a job exists.

`kubectl scale` counts pods: it sets `spec.elasticPolicy.maxWorkers` and shows `status.workers`. A job takes the largest
legal layout below that ceiling, at a start as well, and grows back when it is lifted. The ceiling cannot be below
`spec.elasticPolicy.minWorkers`; `spec.suspend` gives all workers back.
"""


def rendered() -> str:
    """The page."""
    root = root_schema()
    parts = [GENERATED + _INTRODUCTION]
    for name in ("spec", "status"):
        parts += list(_sections(name, root["properties"][name], ""))
    return "\n".join([*parts, _words()])


def _sections(path: str, schema: Schema, change: str) -> Iterator[str]:
    """The table of the object's fields, then the tables of the objects in it."""
    intro = [schema.get("description", ""), f"{change[0].upper()}{change[1:]}." if change else ""]
    lines = [f"## {path}\n", " ".join(filter(None, intro)) + "\n"] if any(intro) else [f"## {path}\n"]
    children: list[tuple[str, Schema, str]] = []
    rows = []
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        changes = _change(name) if path == "spec" else change
        if inner := _object_in(field):
            children.append((here + ("[]" if field["type"] == "array" else ""), inner, changes))
        needed = name in schema.get("required", ())
        cells = [code(name), ", ".join([_type(field, here), *_bounds(field)]), _default(field, needed)]
        rows.append([*cells, *([_fixed(changes)] if path == "spec" else []), field.get("description", "")])
    titles = ["field", "type", "default", *(["changes"] if path == "spec" else []), "meaning"]
    if path.startswith("status"):
        rows, titles = [[row[0], row[1], row[-1]] for row in rows], ["field", "type", "meaning"]
    lines.append(table(titles, rows))
    if refusals := [rule for rule in schema.get("x-kubernetes-validations", ()) if "oldSelf" not in rule["rule"]]:
        lines.append("Refused:\n")
        lines.append(
            "".join(f"- {code(rule.get('fieldPath', '')[1:] or path)}: {rule['message']}\n" for rule in refusals)
        )
    yield "\n".join(lines)
    for child, inner, changes in children:
        yield from _sections(child, inner, changes)


def _object_in(field: Schema) -> Schema | None:
    """The schema of a field that is an object or a list of objects, if it has known fields."""
    inner: Schema = field.get("items", {}) if field.get("type") == "array" else field
    return inner if "properties" in inner else None


def _type(field: Schema, path: str) -> str:
    if "enum" in field:
        return "one of " + ", ".join(map(code, field["enum"]))
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kind = str(field["type"])
    if kind == "array":
        inner = field["items"]
        return f"list of [objects](#{_anchor(path)})" if "properties" in inner else f"list of {_type(inner, path)}s"
    if kind == "object" and "properties" in field:
        return f"[object](#{_anchor(path)})"
    if kind == "object" and "additionalProperties" in field:
        return f"map of {_type(field['additionalProperties'], path)}s"
    return {"date-time": "time"}.get(str(field.get("format")), kind)


def _anchor(path: str) -> str:
    """The anchor that the site and GitHub make from a heading."""
    return re.sub(r"[^\w-]", "", path.lower())


def _default(field: Schema, needed: bool) -> str:
    if needed:
        return "required"
    default = field.get("default")
    if default is None or "properties" in field:
        return ""
    return '""' if default == "" else code(default if isinstance(default, str) else json.dumps(default))


def _bounds(field: Schema) -> list[str]:
    items = field.get("items", {})
    least, most = field.get("minimum"), field.get("maximum")
    words = []
    if least is not None:
        words.append(f"{'above' if field.get('exclusiveMinimum') else 'at least'} {_number(least)}")
    if most is not None and most < _LARGE:
        words.append(f"{'below' if field.get('exclusiveMaximum') else 'at most'} {_number(most)}")
    if (most := field.get("maxItems", field.get("maxProperties"))) is not None:
        words.append(f"at most {most} entries")
    if (length := field.get("maxLength", items.get("maxLength"))) is not None:
        words.append(f"at most {length} characters")
    return words


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _change(name: str) -> str:
    """Whether a field of the spec may change, as the rule that forbids it says."""
    rule = next((rule for rule in IMMUTABILITY_RULES if rule.field == f".{name}"), None)
    return "can be changed at any time" if rule is None else rule.message.removeprefix(f"{name} ")


def _fixed(change: str) -> str:
    return "fixed" if change.startswith("cannot") else re.sub("^can (only )?be changed ", "", change)


def _words() -> str:
    parts = ["## Words of the status and of policies\n"]
    for kind in _WORDS:
        parts.append(f"### {re.sub(r'(?<=[a-z])(?=[A-Z])', ' ', kind.__name__)}\n\n{inspect.getdoc(kind)}\n")
        parts.append(table(("value", "meaning"), ([code(value), text] for value, text in members(kind).items())))
    parts.append("Reasons of conditions, with what to do about each, are in [Operate](operations.md#failures).\n")
    return "\n".join(parts)


def members(kind: type[StrEnum]) -> dict[str, str]:
    """The comment beside each member of an enumeration."""
    found: dict[str, Any] = dict(
        re.findall(r'^ +\w+ = "(\w+)"(?: +#: (.*))?$', inspect.getsource(kind), flags=re.MULTILINE)
    )
    return {member.value: found[member.value] for member in kind}
