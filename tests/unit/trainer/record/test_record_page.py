"""`docs/record.md` names the fields that a run writes, and no others."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipetransformer import Checkpoint, Evaluation, Freeze
from pipetransformer_contract.spec import Cache, CachePolicy, FreezePoint, FreezePolicyName
from tests.testkit import ROOT
from tests.testkit.trainer.script import run

#: Events of runs that fail, skip a step, put freezes on trial, have levels or a manifest beside the script, or move
#: frozen layers off the device.
RARE = {"StepSkipped", "FreezeKept", "LayersOffloaded", "LevelChanged", "Overruled", "Failed"}
ROLE = {"worker", "pipeline", "stage", "layers"}


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of each row below a heading of the page."""
    page = (ROOT / "docs" / "record.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith(("| `", "| |")):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def fields(heading: str) -> set[str]:
    return {name for cells in rows(heading) for name in re.findall(r"`(\w+)`", cells[0])}


def events() -> dict[str, set[str]]:
    """The documented fields of each kind of event."""
    found: dict[str, set[str]] = defaultdict(set)
    kind = ""
    for first, names, _ in rows("events.jsonl"):
        kind = first.strip("`") or kind
        found[kind] |= set(re.findall(r"`(\w+)`", names))
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a small run that freezes, caches, evaluates and saves."""
    folder = tmp_path_factory.mktemp("record")
    points = [FreezePoint(step=2, boundary=1)]
    run(
        folder,
        freeze=Freeze(policy=FreezePolicyName.EXPLICIT, boundaries=points),
        cache=Cache(policy=CachePolicy.ALWAYS),
        evaluation=Evaluation(every_steps=4),
        checkpoint=Checkpoint(location=str(folder / "checkpoint"), every_steps=4),
    )
    return folder / "run"


@pytest.mark.parametrize("heading", ["steps.jsonl", "ledger/WORKER.jsonl", "cache/WORKER.jsonl"])
def test_every_line_has_the_documented_fields(heading: str, record: Path) -> None:
    (file,) = record.glob(heading.replace("WORKER", "*"))

    written = lines(file)

    assert written and all(line.keys() == fields(heading) for line in written)


def test_every_event_has_the_documented_fields(record: Path) -> None:
    documented, written = events(), lines(record / "events.jsonl")

    assert {line["kind"] for line in written} == documented.keys() - RARE
    for line in written:
        assert line.keys() - {"time", "kind"} == documented[line["kind"]], line["kind"]
        for role in line.get("roles", ()):
            assert role.keys() == ROLE


def test_the_summary_has_the_documented_fields(record: Path) -> None:
    summary = json.loads((record / "summary.json").read_text())

    assert summary.keys() == fields("summary.json")
    (cells,) = (cells for cells in rows("summary.json") if cells[0] == "`cache`")
    assert summary["cache"] and all(entry.keys() == set(re.findall(r"`(\w+)`", cells[1])) for entry in summary["cache"])
