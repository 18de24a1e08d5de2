"""What CONTRIBUTING.md and the commit hooks promise: files that exist, and the files that an example really touches."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.testkit import ROOT

#: Hand-written sources, where an example of the table must be named wherever it occurs.
SOURCES = ("contract", "operator", "client", "trainer_image")


class Row(NamedTuple):
    """One row of the table: `edits` are all files that it names, `alternatives` those after an "or"."""

    adds: str
    example: str
    edits: frozenset[str]
    alternatives: frozenset[str]
    command: str


def rows() -> list[Row]:
    table = re.findall(r"^\| (an? [^|]+) \| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", _text(), flags=re.MULTILINE)
    found = []
    for adds, example, edits, command in table:
        files = re.findall(r"(or )?`([\w/]+\.\w+)`", edits)
        named = frozenset(path for _, path in files)
        found.append(Row(adds, example, named, frozenset(path for other, path in files if other), command))
    return found


def _text() -> str:
    return (ROOT / "CONTRIBUTING.md").read_text()


def spellings(name: str) -> re.Pattern[str]:
    """A value (`NodeLost`) also as a constant, a field (`maxSkippedSteps`) also as Python's name, a metric as it is."""
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    other = snake.upper() if name[0].isupper() else snake
    return re.compile(rf"(?<![A-Za-z])({name}|{other})(?![A-Za-z])")


def test_the_table_has_a_row_for_each_kind_of_change() -> None:
    told = " ".join(row.adds for row in rows())
    for kind in ("freeze policy", "schedule", "field of the spec", "failure rule", "metric"):
        assert kind in told


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.adds)
def test_a_row_names_files_that_exist_and_speak_of_its_example(row: Row) -> None:
    spelled = spellings(row.example)
    assert row.edits
    for path in row.edits:
        assert (ROOT / path).is_file(), path
        if path not in row.alternatives:
            assert spelled.search((ROOT / path).read_text()), f"{path} does not speak of {row.example}"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.adds)
def test_a_row_names_each_source_that_its_example_touches(row: Row) -> None:
    spelled = spellings(row.example)
    sources = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    touched = {str(path.relative_to(ROOT)) for path in sources if spelled.search(path.read_text())}
    assert touched
    assert touched <= row.edits


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.adds)
def test_a_row_runs_the_tests_that_it_names(row: Row) -> None:
    folders = re.findall(r"tests/[\w/]+", row.command)
    assert folders
    assert not [folder for folder in folders if not (ROOT / folder).is_dir()]
    tests = [path for path in row.edits if Path(path).name.startswith("test_")]
    run = [test for test in tests if any(test.startswith(f"{folder}/") for folder in folders)]
    assert tests and run == tests


def hooks() -> dict[str, dict[str, object]]:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    return {hook["id"]: hook for hook in local["hooks"]}


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("Say " + "a" * 68, False),
        ("Say " + "a" * 69, True),
        ("Say a\n\n" + "a" * 200, False),
    ],
    ids=["72 characters", "73 characters", "a long line of the body"],
)
def test_the_hook_refuses_a_commit_with_a_subject_over_72_characters(message: str, refused: bool) -> None:
    hook = hooks()["commit-subject"]
    assert hook["language"] == "pygrep" and hook["args"] == ["--multiline"] and hook["stages"] == ["commit-msg"]
    # As pre-commit's pygrep reads it with --multiline.
    found = re.compile(str(hook["entry"]).encode(), re.MULTILINE | re.DOTALL).search(message.encode())
    assert bool(found) is refused


def test_the_hooks_run_tools_that_make_setup_installs() -> None:
    installed = (ROOT / "requirements-dev.txt").read_text()
    tools = [str(hook["entry"]).split()[0] for hook in hooks().values() if hook["language"] == "system"]
    assert len(tools) >= 3
    for tool in tools:
        assert tool.startswith(".venv/bin/")
        assert re.search(rf"^{Path(tool).name}\b", installed, flags=re.MULTILINE)
