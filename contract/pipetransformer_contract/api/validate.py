"""Validates a manifest without an API server, with the same messages.

pydantic checks types and bounds. The CRD's CEL rules are evaluated on the same schema with the same defaults. `labels`
and `template` check what CEL cannot see.
"""

import difflib
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import celpy
from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from .field_error import FieldError
from .job import GROUP, KIND, VERSION, Metadata, PipeTrainingJob
from .labels import label_errors
from .schema import Schema, root_schema, with_defaults
from .template import repeated_name_errors, template_errors

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_QUALIFIED = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"({_LABEL}(\.{_LABEL})*/)?{_QUALIFIED}")
_LABEL_VALUE = re.compile(rf"({_QUALIFIED})?")


def validate_manifest(manifest: Mapping[str, Any]) -> list[FieldError]:
    """Returns all errors of a `PipeTrainingJob` manifest; empty if it is valid."""
    expected = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND}
    wrong = [FieldError(key, f"must be {value}") for key, value in expected.items() if manifest.get(key) != value]
    if wrong:
        return wrong
    manifest = with_name(manifest)
    try:
        # By alias only: the API server would drop `max_gradient_norm` with no more than a warning.
        job = PipeTrainingJob.model_validate_json(json.dumps(manifest, default=str), strict=True, by_name=False)
    except ValidationError as error:
        return [FieldError(_path(detail["loc"]), _words(detail)) for detail in error.errors()]
    return [
        *_name_errors(job.metadata),
        *_label_syntax_errors(job.metadata.labels),
        *_broken_rules(root_schema(), manifest, ""),
        *label_errors(job.metadata.labels, job.spec),
        *template_errors(job.spec),
        *repeated_name_errors(job.spec),
    ]


def with_name(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """If the manifest has only a `generateName`, adds a name that is generated as the API server does."""
    metadata = manifest.get("metadata")
    if not isinstance(metadata, Mapping) or metadata.get("name") or not metadata.get("generateName"):
        return dict(manifest)
    return {**manifest, "metadata": {**metadata, "name": f"{metadata['generateName']}{secrets.token_hex(3)[:5]}"}}


def is_name(text: str) -> bool:
    """Whether the API server accepts `text` as the name of an object."""
    return _SUBDOMAIN.fullmatch(text) is not None


def validate_update(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[FieldError]:
    """Returns the errors of an update of the valid manifest `old` to `new`; empty if the update is allowed."""
    return validate_manifest(new) or list(_broken_rules(root_schema(), new, "", old))


def _name_errors(metadata: Metadata) -> list[FieldError]:
    """Errors of the object's name, with the API server's message."""
    if is_name(metadata.name):
        return []
    message = (
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start"
        " and end with an alphanumeric character"
    )
    return [FieldError("metadata.name", message)]


def _label_syntax_errors(labels: Mapping[str, str]) -> Iterator[FieldError]:
    """Errors of labels that the API server refuses."""
    characters = "letters, digits, '-', '_' and '.', of which the first and the last are a letter or a digit"
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key):
            yield FieldError(
                f"metadata.labels[{key}]", f"a key has an optional domain and '/', then 1 to 63 {characters}"
            )
        elif not _LABEL_VALUE.fullmatch(value):
            yield FieldError(f"metadata.labels[{key}]", f"a value has up to 63 {characters}")


def _words(detail: ErrorDetails) -> str:
    """The message of an error of pydantic. For an unknown field it suggests the known field with the closest name."""
    if detail["type"] != "extra_forbidden":
        return detail["msg"]
    schema, (*parents, wrong) = root_schema(), detail["loc"]
    for step in parents:
        schema = schema.get("items", {}) if isinstance(step, int) else schema.get("properties", {}).get(step, {})
    near = difflib.get_close_matches(str(wrong), schema.get("properties", {}), n=1)
    return "there is no such field" + (f": did you mean {near[0]}?" if near else "")


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _broken_rules(schema: Schema, value: Any, path: str, old: Any = None) -> Iterator[FieldError]:
    """Yields the errors of CEL rules that a value breaks, then those of its fields.

    With an `old` value only rules that compare with it (`oldSelf`) are evaluated, otherwise only the other rules.
    """
    value = with_defaults(schema, value)
    old = with_defaults(schema, old)
    for validation in schema.get("x-kubernetes-validations", ()):
        rule = validation["rule"]
        transition = "oldSelf" in rule
        if transition == (old is not None) and not _holds(rule, schema, value, old):
            yield FieldError((path + validation.get("fieldPath", "")).removeprefix("."), validation["message"])
    if isinstance(value, Mapping):
        for name, field in schema.get("properties", {}).items():
            if name in value:
                was = old.get(name) if isinstance(old, Mapping) else None
                yield from _broken_rules(field, value[name], f"{path}.{name}", was)


def _holds(rule: str, schema: Schema, value: Any, old: Any) -> bool:
    """Whether a value keeps a rule. If the rule cannot be computed, the value breaks it, as on the API server."""
    names = {"self": _to_cel(schema, value)} | ({} if old is None else {"oldSelf": _to_cel(schema, old)})
    try:
        return bool(_program(rule).evaluate(names))
    except CELEvalError:
        return False


@cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _to_cel(schema: Schema, value: Any) -> Any:
    """Converts `value` to a CEL value of the type in its schema.

    A `1` in a field of type number becomes a double, and so does an integer of more than 64 bits in free-form options,
    as on the API server."""
    if isinstance(value, Mapping):
        fields = schema.get("properties", {})
        others = schema.get("additionalProperties", {})
        return celtypes.MapType(
            {celtypes.StringType(name): _to_cel(fields.get(name, others), item) for name, item in value.items()}
        )
    if isinstance(value, list):
        return celtypes.ListType([_to_cel(schema.get("items", {}), item) for item in value])
    if schema.get("type") == "number" or (isinstance(value, int) and value.bit_length() > 63):
        return celtypes.DoubleType(value)
    return json_to_cel(value)
