"""The commands of a document: what its ```console blocks say after `$ `, and lines that go on after a backslash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        section: the nearest heading above it; empty above the first.
        text: what is typed, without the prompt; it may have several lines.
    """

    section: str
    text: str


def commands(document: Path) -> list[Command]:
    """The commands of a Markdown file, in its order.

    Raises:
        ValueError: a block holds a line that belongs to no command.
    """
    text = document.read_text(encoding="utf-8")
    headings = [(match.start(), match[1].strip()) for match in _HEADING.finditer(_without_blocks(text))]
    found = []
    for block in _BLOCK.finditer(text):
        section = next((title for start, title in reversed(headings) if start < block.start()), "")
        found += [Command(section, command) for command in _typed(block[1], document)]
    return found


def _without_blocks(text: str) -> str:
    """The text with each block of code blanked: a comment in it is no heading."""
    return re.sub(r"^```.*?^```", lambda match: " " * len(match[0]), text, flags=re.DOTALL | re.MULTILINE)


def _typed(block: str, document: Path) -> Iterator[str]:
    command: list[str] = []
    for line in block.splitlines():
        if command and command[-1].endswith("\\"):
            command.append(line)
            continue
        if command:
            yield "\n".join(command)
        if not line.startswith("$ "):
            raise ValueError(f"{document.name}: {line!r} is in a console block, and no command")
        command = [line.removeprefix("$ ")]
    if command:
        yield "\n".join(command)
