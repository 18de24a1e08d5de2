"""The list of mutants: what is changed, what that breaks, and the tests of the same room that must fail then."""

import ast
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: path in the repository.
        old: text that occurs exactly once in it.
        new: what stands there instead.
        breaks: what goes wrong, in one sentence.
        killed_by: tests, as pytest names them; at least one has to fail. Empty for an equivalent.
        equivalent: why no test can notice the change; empty where one does.
    """

    file: str
    old: str
    new: str
    breaks: str
    killed_by: tuple[str, ...] = ()
    equivalent: str = ""

    def apply(self, source: str) -> str:
        """The changed file.

        Raises:
            ValueError: the old text does not occur exactly once, or the change is no Python.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file}: expected this text once, found it {count} times: {self.old!r}")
        changed = source.replace(self.old, self.new)
        ast.parse(changed, self.file)
        return changed


def all_mutants() -> list[Mutant]:
    """Those of all lists in this folder, equivalents too."""
    mutants = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            mutants.append(Mutant(**entry | {"killed_by": tuple(entry.get("killed_by", ()))}))
    return mutants


def faults(mutants: list[Mutant], root: Path) -> list[str]:
    """What is wrong with a list for the tree at `root`: a change that cannot be made, or a test that is not there."""
    found = []
    for mutant in mutants:
        try:
            mutant.apply((root / mutant.file).read_text())
        except (OSError, ValueError, SyntaxError) as error:
            found.append(f"{mutant.breaks} {error}")
        if bool(mutant.killed_by) == bool(mutant.equivalent):
            found.append(f"{mutant.breaks} {mutant.file}: name the tests that kill it, or say why it is equivalent")
        for test in mutant.killed_by:
            if not _exists(test, root):
                found.append(f"{mutant.breaks} {mutant.file}: there is no test {test}")
    return found


def _exists(test: str, root: Path) -> bool:
    """Whether a file has the function that `file::function[parameters]` names."""
    file, _, function = test.partition("::")
    path, name = root / file, function.partition("[")[0]
    return (
        path.is_file() and re.search(rf"^(async )?def {re.escape(name)}\(", path.read_text(), re.MULTILINE) is not None
    )
