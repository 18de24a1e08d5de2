"""The base of spec types: they refuse unknown fields, and have rules between fields."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from .conditions import Condition
from .wire import Wire


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold for `self`, and the message if it does not.

    Attributes:
        condition: a `Condition`, or CEL alone where only the API server and `validate_manifest` check it.
        message: says what to do.
        field: path below `self` that the error names, such as `.alpha`.
    """

    condition: Condition | str
    message: str
    field: str = ""

    @property
    def rule(self) -> str:
        """The CEL."""
        return self.condition if isinstance(self.condition, str) else self.condition.cel

    @property
    def holds(self) -> Callable[[Any], bool] | None:
        """Checks the type itself, for a program's spec, which no API server sees; None for CEL alone."""
        return None if isinstance(self.condition, str) else self.condition.holds


class SpecModel(Wire):
    """Base of spec types. Unlike messages they refuse unknown fields: a typing error must not train something else."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    rules: ClassVar[tuple[Rule, ...]] = ()
