"""What one run of the demo gave: its record, and the test images that its model gets wrong."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from pipetransformer_client.timeline import Record


@dataclass(frozen=True)
class Measured:
    """A run that has ended.

    Attributes:
        record: layouts, freezes, steps and evaluations over time.
        wrong: numbers of the test images whose class the model does not find.
        tested: number of test images.
        machine: where it ran.
    """

    record: Record
    wrong: tuple[int, ...]
    tested: int
    machine: str

    @property
    def accuracy(self) -> float:
        """Share of the test images whose class the model finds."""
        return 1 - len(self.wrong) / self.tested

    @property
    def standard_error(self) -> float:
        """Standard error of `accuracy`, binomial."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.tested)


_MEASURED = TypeAdapter(Measured)


def save(measured: Measured, file: Path) -> None:
    """Writes a run, so that a later demo can compare with it."""
    file.write_text(json.dumps(_MEASURED.dump_python(measured, mode="json"), separators=(",", ":")) + "\n")


def load(file: Path) -> Measured:
    """Reads a run that `save` wrote.

    Raises:
        FileNotFoundError: there is none. The message says which command writes it.
    """
    if not file.exists():
        raise FileNotFoundError(f"there is no recorded baseline {file}: `make demo-baseline` measures one")
    return _MEASURED.validate_json(file.read_bytes())
