"""Each command of README and docs is run by a test."""

import ast

from tests.testkit import ROOT
from tests.testkit.documented import all_commands


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
