"""The base of spec types, which refuse unknown fields and have rules between fields."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from .conditions import Condition
from .wire import Wire


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on `self`, and the message if it is not met.

    Attributes:
        condition: a `Condition`, or only CEL if just the API server and `validate_manifest` check it.
        message: tells the user what to do.
        field: path below `self` that the error names, such as `.alpha`.
    """

    condition: Condition | str
    message: str
    field: str = ""

    @property
    def rule(self) -> str:
        """The rule as CEL."""
        return self.condition if isinstance(self.condition, str) else self.condition.cel

    @property
    def holds(self) -> Callable[[Any], bool] | None:
        """Checks the type in Python, for a program's spec that no API server sees; None for a rule only in CEL."""
        return None if isinstance(self.condition, str) else self.condition.holds


class SpecModel(Wire):
    """Base of spec types. Unlike messages they refuse unknown fields, so a typo cannot change the training."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    rules: ClassVar[tuple[Rule, ...]] = ()
