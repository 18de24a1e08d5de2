"""The walks of docs/architecture.md: which files a freeze report and a micro-batch pass, and how many those are.

`.venv/bin/python -m tools.docs.walks` prints each count beside its bar, and fails past one.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.devcluster.layout import REPOSITORY

PAGE = REPOSITORY / "docs" / "architecture.md"
PACKAGES = (
    REPOSITORY / "contract" / "pipetransformer_contract",
    REPOSITORY / "operator" / "pipetransformer_operator",
    REPOSITORY / "trainer_image" / "pipetransformer",
)
#: The title of each walk, and the most files that it may pass.
BARS = {
    "The walk of a freeze report": 40,
    "The walk of a micro-batch": 18,
    "Beside the walk of a micro-batch": 17,
}


@dataclass(frozen=True)
class Walk:
    """One section of the page, and the files that it names, each once, in their order."""

    title: str
    names: tuple[str, ...]
    bar: int

    @property
    def met(self) -> bool:
        return len(self.names) <= self.bar


def walks() -> list[Walk]:
    """Those of the page."""
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL))
    return [
        Walk(title, tuple(dict.fromkeys(re.findall(r"`([\w/]+\.py)`", sections[title]))), bar)
        for title, bar in BARS.items()
    ]


def files_of(name: str) -> list[Path]:
    """The files of our packages that a walk may mean by a name: exactly one, if the page is right."""
    return [file for package in PACKAGES if (file := package / name).is_file()]


def main() -> int:
    """Print the counts."""
    found = walks()
    for walk in found:
        said = "met" if walk.met else "past the bar"
        print(f"{walk.title:34} {len(walk.names):4} files, at most {walk.bar}: {said}")
    return int(any(not walk.met for walk in found))


if __name__ == "__main__":
    sys.exit(main())
