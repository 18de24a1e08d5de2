"""What a type of a spec is: fields that refuse what they do not know, and rules between them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from .wire import Wire


@dataclass(frozen=True, slots=True)
class Rule:
    """One CEL validation on `self`. `field` is the path below `self` that the error names, such as `.alpha`.

    `holds` says the same of the type, for a program's spec, which no API server sees.
    """

    rule: str
    message: str
    field: str = ""
    holds: Callable[[Any], bool] | None = None


class SpecModel(Wire):
    """Base of spec types. Unlike messages they refuse unknown fields: a typing error must not train something else."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    rules: ClassVar[tuple[Rule, ...]] = ()
