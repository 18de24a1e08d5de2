"""The list of mutants fits the tree, and says so where it does not."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.__main__ import judge
from tests.mutants.copy import Copy
from tests.mutants.entries import ROOT, Mutant, all_mutants, faults


def test_every_mutant_changes_code_that_is_there_and_names_tests_that_are() -> None:
    mutants = all_mutants()

    assert faults(mutants, ROOT) == []
    changes = [(mutant.file, mutant.old, mutant.new) for mutant in mutants]
    assert len(changes) == len(set(changes))
    assert sum(not mutant.equivalent for mutant in mutants) >= 60


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"old": "gone"}, "expected this text once, found it 0 times: 'gone'"),
        ({"old": "x"}, "expected this text once, found it 2 times: 'x'"),
        ({"file": "elsewhere.py"}, "No such file"),
        ({"new": "x = ("}, "was never closed"),
        ({"killed_by": ("test_code.py::test_of_old",)}, "there is no test test_code.py::test_of_old"),
        ({"killed_by": ()}, "name the tests that kill it, or say why it is equivalent"),
        ({"equivalent": "It is the same."}, "name the tests that kill it, or say why it is equivalent"),
    ],
)
def test_an_entry_that_does_not_fit_the_tree_is_named(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = 1\nprint(x)\n")
    (tmp_path / "test_code.py").write_text("def test_of_it(): ...\n")
    entry: dict[str, Any] = {"file": "code.py", "old": "x = 1", "new": "x = 2", "breaks": "It prints 2."}
    fits = entry | {"killed_by": ("test_code.py::test_of_it[1]",)}

    assert faults([Mutant(**fits)], tmp_path) == []
    (found,) = faults([Mutant(**fits | changes)], tmp_path)

    assert found.startswith("It prints 2.") and complaint in found


def test_a_mutant_is_killed_by_a_test_that_fails_and_by_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["git", "init", "--quiet", root], check=True)
    (root / "code.py").write_text("x = 1\n")
    (root / "test_code.py").write_text(
        "from pathlib import Path\n\n\ndef test_of_it():\n    assert 'x = -1' not in Path('code.py').read_text()\n"
    )
    mutants = [
        Mutant(file="code.py", old="x = 1", new=new, breaks=f"It is {new}.", killed_by=(test,))
        for new, test in (
            ("x = -1", "test_code.py::test_of_it"),
            ("x = 2", "test_code.py::test_of_it"),
            ("x = -1", "test_code.py::test_of_old"),
        )
    ]

    survivors = judge(mutants, [Copy(tmp_path / "copy", root)])

    assert [mutant for mutant, _ in survivors] == mutants[1:]
    assert survivors[0][1] == "its tests pass" and survivors[1][1].startswith("its tests did not run")
    assert (tmp_path / "copy" / "code.py").read_text() == (root / "code.py").read_text() == "x = 1\n"
