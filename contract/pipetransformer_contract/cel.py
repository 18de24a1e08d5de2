"""Predicates on fields of a spec. Each is written once, and becomes both CEL and a Python function.

The API server evaluates the CEL, and Python checks a program's spec. For example,
`field("policy").is_not("Always") | field("memory_bytes").above(0)` becomes the CEL
`self.policy != 'Always' || self.memoryBytes > 0` and a function of the spec with the same result.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic.alias_generators import to_camel


@dataclass(frozen=True, slots=True)
class Predicate:
    """Says whether a spec meets a condition.

    Attributes:
        cel: the condition as CEL.
        holds: the same condition as a function of the spec.
        operator: the operator that joins the parts of `cel`, such as `&&`; empty if there is only one part.
    """

    cel: str
    holds: Callable[[Any], bool]
    operator: str = ""

    def __or__(self, other: "Predicate") -> "Predicate":
        return self._join("||", other, lambda spec: self.holds(spec) or other.holds(spec))

    def __and__(self, other: "Predicate") -> "Predicate":
        return self._join("&&", other, lambda spec: self.holds(spec) and other.holds(spec))

    def __invert__(self) -> "Predicate":
        return Predicate(f"!{self._within('!')}", lambda spec: not self.holds(spec))

    def _join(self, operator: str, other: "Predicate", holds: Callable[[Any], bool]) -> "Predicate":
        return Predicate(f"{self._within(operator)} {operator} {other._within(operator)}", holds, operator)

    def _within(self, operator: str) -> str:
        return self.cel if self.operator in ("", operator) else f"({self.cel})"


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a spec that predicates compare.

    Attributes:
        cel: the value as CEL.
        of: a function that reads the value from a spec.
    """

    cel: str
    of: Callable[[Any], Any]

    def is_(self, constant: str | float) -> Predicate:
        return Predicate(f"{self.cel} == {constant!r}", lambda spec: bool(self.of(spec) == constant))

    def is_not(self, constant: str | float) -> Predicate:
        return Predicate(f"{self.cel} != {constant!r}", lambda spec: bool(self.of(spec) != constant))

    def above(self, constant: int) -> Predicate:
        return Predicate(f"{self.cel} > {constant}", lambda spec: bool(self.of(spec) > constant))

    def at_most(self, other: "Value") -> Predicate:
        return Predicate(f"{self.cel} <= {other.cel}", lambda spec: bool(self.of(spec) <= other.of(spec)))

    def is_among(self, constants: Iterable[str]) -> Predicate:
        known = [str(constant) for constant in constants]
        return Predicate(f"{self.cel} in {known}", lambda spec: self.of(spec) in known)

    def is_none_of(self, constants: Iterable[str]) -> Predicate:
        among = self.is_among(constants)
        return Predicate(f"!({among.cel})", lambda spec: not among.holds(spec))

    def starts_with(self, text: str) -> Predicate:
        return Predicate(f"{self.cel}.startsWith({text!r})", lambda spec: bool(self.of(spec).startswith(text)))

    def matches(self, pattern: str) -> Predicate:
        """Whether the pattern matches a part of the text. As in CEL, `$` does not match before a final line break."""
        compiled = re.compile(re.sub(r"\$$", r"\\Z", pattern))
        return Predicate(f"{self.cel}.matches('{pattern}')", lambda spec: compiled.search(self.of(spec)) is not None)

    def __mod__(self, other: "Value") -> "Value":
        return Value(f"{self.cel} % {other.cel}", lambda spec: self.of(spec) % other.of(spec))


def field(path: str) -> Value:
    """The field with this Python name, or path of names such as `pipeline.stages`."""
    return Value(".".join(["self", *map(to_camel, path.split("."))]), attrgetter(path))


def is_true(path: str) -> Predicate:
    """Whether a field of type boolean is true."""
    return Predicate(field(path).cel, field(path).of)


def given(path: str) -> Predicate:
    """Whether an optional field is set."""
    return Predicate(f"has({field(path).cel})", lambda spec: field(path).of(spec) is not None)


def size(name: str) -> Value:
    """Number of items of a list."""
    return Value(f"size(self.{to_camel(name)})", lambda spec: len(getattr(spec, name)))


def exactly_one(one: str, other: str) -> Predicate:
    """Whether exactly one of two optional fields is set."""
    first, second = given(one), given(other)
    return Predicate(f"{first.cel} != {second.cel}", lambda spec: first.holds(spec) != second.holds(spec))


def not_both(one: str, other: str) -> Predicate:
    """Whether at most one of two optional fields is set."""
    return ~given(one) | ~given(other)
