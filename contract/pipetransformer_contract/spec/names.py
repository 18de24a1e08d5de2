"""Types and rules for names and locations, which several sections of the spec share."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from pipetransformer_contract.cel import Predicate, field
from pipetransformer_contract.spec_model import Rule

#: The name of a model or dataset that the program in the pod passes to `pipetransformer.train`.
SCRIPT = "script"
#: A known name, or `module:attribute`, which is imported in the trainer's image.
ImportPath = Annotated[str, Field(min_length=1, max_length=253)]
#: Pattern of `module:attribute`.
IMPORT_PATH = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"
_URL = r"^[a-z][a-z0-9+.-]*://.+"
IS_A_LOCATION = Rule(
    field("location").starts_with("/") | field("location").matches(_URL),
    "location must be an absolute path of a mounted volume or an fsspec URL",
    ".location",
)


def known_or_imported(name: str, known: Iterable[str]) -> Predicate:
    """Whether the field `name` has one of the `known` values, or the form `module:attribute`."""
    return field(name).is_among(known) | field(name).matches(IMPORT_PATH)
