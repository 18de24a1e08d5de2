"""Names and locations, which several sections of a spec have."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from pipetransformer_contract.conditions import Condition, field
from pipetransformer_contract.spec_model import Rule

#: Value of a name in the spec if the pod's own program passes the object to `pipetransformer.train`.
SCRIPT = "script"
#: A registered name, or `module:attribute` to import in the trainer's image.
ImportPath = Annotated[str, Field(min_length=1, max_length=253)]
_IMPORT_PATH = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"
_URL = r"^[a-z][a-z0-9+.-]*://.+"
IS_A_LOCATION = Rule(
    field("location").starts_with("/") | field("location").matches(_URL),
    "location must be an absolute path of a mounted volume or an fsspec URL",
    ".location",
)


def known_or_imported(name: str, known: Iterable[str]) -> Condition:
    """Whether the field holds a known name, or `module:attribute`."""
    return field(name).is_among(known) | field(name).matches(_IMPORT_PATH)
