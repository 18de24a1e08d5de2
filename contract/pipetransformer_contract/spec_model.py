"""The base class of the spec's types. They refuse unknown fields, and have rules between fields."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

from pydantic import ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from .cel import Predicate
from .wire import Wire


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the CRD: a condition on an object of the spec (`self` in CEL), and the message if it is not met.

    Attributes:
        condition: a `Predicate`; or CEL, if only the API server and `validate_manifest` check the rule.
        message: the message, which tells the user what to do.
        field: path of the field that the error names, below the object, such as `.alpha`.
    """

    condition: Predicate | str
    message: str
    field: str = ""

    @property
    def cel(self) -> str:
        """The condition as CEL."""
        return self.condition if isinstance(self.condition, str) else self.condition.cel

    @property
    def holds(self) -> Callable[[Any], bool] | None:
        """The condition as a function of the object, for the specs of programs. None if the rule exists only in CEL."""
        return None if isinstance(self.condition, str) else self.condition.holds


def _with_one_error(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Validates a union, whose own errors are one for each type, at paths that no manifest has."""
    try:
        return validate(value)
    except ValidationError as error:
        words = "Input should be an integer or a string: put other numbers in quotes"
        raise PydanticCustomError("int_or_string", words) from error


#: As Kubernetes writes quantities, such as 1 or "500m".
IntOrString = Annotated[int | str, WrapValidator(_with_one_error)]


class SpecModel(Wire):
    """Base of spec types. Unlike messages they refuse unknown fields, so a typo cannot change the training."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, allow_inf_nan=False
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, /, **fields: Any) -> None:
            """Refuses unknown arguments with a `TypeError` that suggests the known argument closest to it."""
            known = _arguments(type(self))
            for name in fields:
                if name not in known:
                    near = _in_a_part(type(self), name) or get_close_matches(name, known, n=1)
                    words = "".join(f' (did you mean "{one}"?)' for one in near)
                    raise TypeError(f'{type(self).__name__} has no argument "{name}"{words}')
            super().__init__(**fields)

        __init__.__pydantic_base_init__ = True  # pydantic then skips it when it validates, and reports its own errors


def _arguments(kind: type[SpecModel]) -> list[str]:
    """Names of the arguments of a spec type, each also as in a manifest."""
    return [name for own, info in kind.model_fields.items() for name in {own, info.alias or own}]


def _in_a_part(kind: type[SpecModel], name: str) -> list[str]:
    """How to pass an argument that a part of this type has, such as `optimizer=Optimizer(learning_rate=...)`."""
    return [
        f"{own}={part.__name__}({name}=...)"
        for own, info in kind.model_fields.items()
        for part in (info.annotation, *get_args(info.annotation))
        if isinstance(part, type) and issubclass(part, SpecModel) and name in _arguments(part)
    ][:1]
