"""Turns the API's types into the structural schema that the API server requires.

It differs from pydantic's JSON schema in three ways. It has neither `$ref` nor `anyOf` with null. It has exclusive
bounds as in OpenAPI 3.0. And because Kubernetes applies the defaults in a nested object only if the object itself has a
default, it has such a default.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from pipetransformer_contract.spec_model import Rule, SpecModel

from .job import JobSpec, Opaque
from .rules import CROSS_FIELD_RULES, IMMUTABILITY_RULES, ROOT_RULES
from .status import JobStatus

Schema = dict[str, Any]

#: For each list that Kubernetes merges as a map: the field that is the key, by the name of the list.
LIST_MAP_KEYS: Mapping[str, str] = {
    "conditions": "type",
    "containers": "name",
    "members": "name",
    "leavers": "name",
    "offers": "stages",
    "stepSeconds": "pipelines",
}
_COPIED = (
    "type",
    "description",
    "enum",
    "format",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "maxItems",
    "minItems",
)
_MAX_PROPERTIES = 64


@cache
def root_schema() -> Schema:
    """The schema of the whole object, for `openAPIV3Schema`."""
    spec = structural(JobSpec)
    spec["x-kubernetes-validations"] = [
        *spec.get("x-kubernetes-validations", []),
        *map(_validation, (*CROSS_FIELD_RULES, *IMMUTABILITY_RULES)),
    ]
    return {
        "type": "object",
        "description": "A training job whose pipelines shrink as its layers freeze.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": spec,
            # Only the operator writes the status, always as a whole. Without "atomic" each write would make the API
            # server compare all fields and store their list, which is half of the object.
            "status": structural(JobStatus, defaults=False) | {"x-kubernetes-map-type": "atomic"},
        },
        "x-kubernetes-validations": [_validation(rule) for rule in ROOT_RULES],
    }


def structural(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """The structural schema of a type. Without `defaults` it has no defaults, as for a status: its writer sets all
    fields."""
    document = model.model_json_schema(by_alias=True)
    types = {kind.__name__: kind for kind in _types_within(model)}
    return _Converter(document.get("$defs", {}), types, defaults).convert(document | {"title": model.__name__})


def with_defaults(schema: Schema, value: Any) -> Any:
    """Adds the schema's defaults to `value` as the API server does: to an object first, then to the objects in it."""
    if isinstance(value, Mapping):
        known = schema.get("properties", {})
        missing = {name: field["default"] for name, field in known.items() if "default" in field and name not in value}
        return {name: with_defaults(known.get(name, {}), item) for name, item in (dict(value) | missing).items()}
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), item) for item in value]
    return value


def without_nulls(schema: Schema, value: Any) -> Any:
    """Removes null fields from `value`, such as a YAML key without a value, as the API server does.

    Fields that the schema does not know stay null. Of the fields that it knows, none may be null."""
    if isinstance(value, Mapping):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        there = {name: item for name, item in value.items() if item is not None or not (others or name in known)}
        return {name: without_nulls(known.get(name, {}), item) for name, item in there.items()}
    if isinstance(value, list):
        return [without_nulls(schema.get("items", {}), item) for item in value]
    return value


def pruned(schema: Schema, value: Any) -> Any:
    """Removes unknown fields from `value` wherever the API server would drop them."""
    if isinstance(value, Mapping) and "properties" in schema:
        known, keeps = schema["properties"], schema.get("x-kubernetes-preserve-unknown-fields", False)
        return {name: pruned(known.get(name, {}), item) for name, item in value.items() if keeps or name in known}
    if isinstance(value, Mapping) and "additionalProperties" in schema:
        return {name: pruned(schema["additionalProperties"], item) for name, item in value.items()}
    if isinstance(value, list):
        return [pruned(schema.get("items", {}), item) for item in value]
    return value


def with_opaque_lists(schema: Schema) -> Schema:
    """The schema of a status with less to check: entries of its lists, except `conditions`, are objects of any content.

    Each write of a status makes the API server check the whole object, and only the operator writes it."""
    if schema.get("items", {}).get("type") == "object":
        kept = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-list-")}
        return kept | {"items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    if "properties" not in schema:
        return schema
    fields = schema["properties"].items()
    return schema | {
        "properties": {name: field if name == "conditions" else with_opaque_lists(field) for name, field in fields}
    }


def missing_fields(ours: Schema, theirs: Schema, path: str = "") -> list[str]:
    """Paths of the fields that the schema `ours` has, and that a server with the schema `theirs` would drop."""
    missing: list[str] = []
    if theirs.get("x-kubernetes-preserve-unknown-fields"):
        return missing
    for name, field in ours.get("properties", {}).items():
        other = theirs.get("properties", {}).get(name)
        missing += [f"{path}.{name}"] if other is None else missing_fields(field, other, f"{path}.{name}")
    if "items" in ours:
        missing += missing_fields(ours["items"], theirs.get("items", {}), f"{path}[]")
    return missing


def _types_within(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for kind in _leaves(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _types_within(kind)


def _leaves(annotation: Any) -> Iterator[Any]:
    arguments = get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _leaves(argument)


def _validation(rule: Rule) -> Schema:
    validation = {"rule": rule.cel, "message": rule.message}
    return validation | {"fieldPath": rule.field} if rule.field else validation


class _Converter:
    def __init__(self, definitions: Mapping[str, Schema], types: Mapping[str, type[BaseModel]], defaults: bool) -> None:
        self._definitions = definitions
        self._types = types
        self._defaults = defaults

    def convert(self, source: Schema) -> Schema:
        source = self._resolved(source)
        if {option.get("type") for option in source.get("anyOf", [])} - {"null"} == {"integer", "string"}:
            described = {key: source[key] for key in ("description",) if key in source}
            return {"x-kubernetes-int-or-string": True} | described
        target: Schema = {key: source[key] for key in _COPIED if key in source}
        if target.get("type") == "integer":
            target["format"] = "int64"
        for bound in ("Minimum", "Maximum"):
            if (value := source.get(f"exclusive{bound}")) is not None:
                target |= {bound.lower(): value, f"exclusive{bound}": True}
        if self._defaults and source.get("default") is not None:
            target["default"] = source["default"]
        if "items" in source:
            target["items"] = self.convert(source["items"])
        if target.get("type") == "object":
            target |= self._object(source)
        return target

    def _resolved(self, source: Schema) -> Schema:
        """Replaces a `$ref`, or an `anyOf` of one schema and null, by that schema. Keywords beside it win."""
        alternatives = [option for option in source.get("anyOf", []) if option.get("type") != "null"]
        if len(alternatives) == 1:
            outer = {key: value for key, value in source.items() if key != "anyOf"}
            return self._resolved(alternatives[0] | outer)
        if reference := source.get("$ref"):
            outer = {key: value for key, value in source.items() if key != "$ref"}
            return self._definitions[reference.removeprefix("#/$defs/")] | outer
        return source

    def _object(self, source: Schema) -> Schema:
        if "properties" not in source:
            values = source.get("additionalProperties")
            if not isinstance(values, dict) or not values:
                return {"x-kubernetes-preserve-unknown-fields": True}
            return {
                "maxProperties": source.get("maxProperties", _MAX_PROPERTIES),
                "additionalProperties": self.convert(values),
            }
        kind = self._types[source["title"]]
        target: Schema = {
            "properties": {name: self._property(name, field, kind) for name, field in source["properties"].items()}
        }
        if "description" in source:
            target["description"] = _in_names_of_fields(source["description"], kind)
        if "required" in source:
            target["required"] = source["required"]
        if issubclass(kind, Opaque):
            target["x-kubernetes-preserve-unknown-fields"] = True
        if issubclass(kind, SpecModel) and kind.rules:
            target["x-kubernetes-validations"] = [_validation(rule) for rule in kind.rules]
        return target

    def _property(self, name: str, source: Schema, owner: type[BaseModel]) -> Schema:
        target = self.convert(source)
        fields = {field.alias or python_name: field for python_name, field in owner.model_fields.items()}
        if self._defaults and not issubclass(owner, Opaque) and _is_made_of_defaults(fields[name].default_factory):
            target["default"] = with_defaults(target, {})  # complete, because the API server checks rules on it
        if target.get("type") == "array" and name in LIST_MAP_KEYS:
            target |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [LIST_MAP_KEYS[name]]}
        return target


def _in_names_of_fields(text: str, kind: type[BaseModel]) -> str:
    """Replaces the Python names of fields in a docstring by their names in the API, which users know."""
    aliases = {name: field.alias or name for name, field in kind.model_fields.items()}
    return re.sub(r"`(\w+)`", lambda found: f"`{aliases.get(found[1], found[1])}`", text)


def _is_made_of_defaults(factory: object) -> bool:
    return isinstance(factory, type) and issubclass(factory, BaseModel)
