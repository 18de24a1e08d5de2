"""All commands that README and docs show, for the tests that run them.

A test that asks for some by `documented("make demo")`, or plays a page by `Guide("docs/install.md", ...)`, and runs
what it gets, claims those commands. `tests/unit/docs/test_commands.py` fails where a command is claimed by nobody.
"""

from pathlib import Path

from tests.testkit import ROOT
from tests.testkit.console import commands


def pages() -> list[Path]:
    """What is written for people."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def all_commands() -> dict[str, set[str]]:
    """Each command, on one line, and the pages below the repository's root that show it."""
    found: dict[str, set[str]] = {}
    for page in pages():
        for command in commands(page):
            line = " ".join(command.text.replace("\\\n", " ").split())
            found.setdefault(line, set()).add(str(page.relative_to(ROOT)))
    return found


def documented(start: str) -> list[str]:
    """The commands that begin so.

    Raises:
        LookupError: there is none.
    """
    found = [command for command in all_commands() if f"{command} ".startswith(f"{start} ")]
    if not found:
        raise LookupError(f"no page has a command that begins with {start!r}")
    return found
