"""Each command of README and docs is run by a test, those that need no cluster here."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.testkit import ROOT
from tests.testkit.documented import all_commands, documented

DEMO = "examples/vit-digits.yaml"


def claims() -> tuple[set[str], set[str]]:
    """Beginnings of commands that tests ask for by `documented`, and pages that they play by `Guide`."""
    found: dict[str, set[str]] = {"documented": set(), "Guide": set()}
    for file in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(file.read_text())
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in found and node.args:
                first = node.args[0]
                value = constants.get(first.id) if isinstance(first, ast.Name) else first
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[node.func.id].add(value.value)
    return found["documented"], found["Guide"]


def begins(command: str, start: str) -> bool:
    return f"{command} ".startswith(f"{start} ")


def test_every_command_is_run_by_a_test() -> None:
    starts, played = claims()
    by_ci = set((ROOT / ".ci" / "run").read_text().splitlines())
    unclaimed = {
        command: pages
        for command, pages in all_commands().items()
        if not pages & played and command not in by_ci and not any(begins(command, start) for start in starts)
    }
    assert unclaimed == {}


def test_what_tests_run_is_still_documented() -> None:
    starts, played = claims()
    found = all_commands()
    assert not [start for start in starts if not any(begins(command, start) for command in found)]
    assert played <= set().union(*found.values())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The examples, and the environment that `make setup` makes."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    return tmp_path


def run(checkout: Path, *commands: str) -> str:
    """Types commands into one shell; what they printed."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shell = ["bash", "-euo", "pipefail", "-c", "\n".join(commands)]
    done = subprocess.run(shell, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize(
    "shorter",
    [
        pytest.param(True, id="in short"),
        pytest.param(False, id="as it is", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_the_demo_trains_and_its_record_is_drawn(checkout: Path, shorter: bool) -> None:
    if shorter:
        shorten(checkout / DEMO)
    (made,) = documented("make demo")
    recipe = subprocess.run([*made.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (command,) = (line for line in recipe.splitlines() if f" run {DEMO} " in line)
    record = checkout / "runs" / "vit-digits"
    record.mkdir(parents=True)
    (record / "events.jsonl").write_text('{"time": 0, "kind": "Started", "job": "an earlier one"}\n')
    run(checkout, command)
    (drawn,) = documented("pipetransformer timeline")
    run(checkout, *documented("source .venv/bin/activate"), drawn)
    summary = json.loads((record / "summary.json").read_text())
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    for name in re.findall(r"^\| `(\w+[./]\w*)`", (ROOT / "docs" / "start.md").read_text(), flags=re.MULTILINE):
        assert (record / name).exists(), f"docs/start.md promises {name}"
    assert (record / "timeline.html").exists()


def shorten(manifest: Path) -> None:
    """One epoch of two blocks on one worker."""
    job = yaml.safe_load(manifest.read_text())
    spec = job["spec"]
    spec["training"]["epochs"], spec["model"]["numLayers"], spec["pipeline"]["stages"] = 1, 2, 1
    spec["elasticPolicy"] |= {"workers": 1, "maxWorkers": 1}
    manifest.write_text(yaml.safe_dump(job))
