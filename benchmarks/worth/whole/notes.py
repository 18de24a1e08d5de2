"""Runs that were measured, in a file, so that an interrupted benchmark goes on."""

import json
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from .took import Took

_TOOK = TypeAdapter(Took)


class Notes:
    """Runs by case and way. With a file, those of an earlier command count, and each new one is added to it."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._runs: dict[str, dict[str, list[Took]]] = {}
        if file is not None and file.exists():
            for line in map(json.loads, file.read_text().splitlines()):
                self._of(line["case"], line["way"]).append(_TOOK.validate_python(line["took"]))

    def ways(self, case: str) -> dict[str, list[Took]]:
        """The runs of a case, by way; none without a run."""
        return self._runs.get(case, {})

    def count(self, case: str, way: str) -> int:
        """Number of runs."""
        return len(self.ways(case).get(way, ()))

    def add(self, case: str, way: str, took: Took) -> None:
        """Note a run."""
        self._of(case, way).append(took)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps({"case": case, "way": way, "took": asdict(took)}) + "\n")

    def _of(self, case: str, way: str) -> list[Took]:
        return self._runs.setdefault(case, {}).setdefault(way, [])
