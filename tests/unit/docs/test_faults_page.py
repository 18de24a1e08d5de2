"""The page of faults names tests that there are."""

import re

import pytest

from tests.testkit import ROOT

_PAGE = (ROOT / "docs" / "faults.md").read_text()
_FOLDERS = {"on kubelets": ["tests/e2e"], "elsewhere": ["tests/integration", "tests/unit"]}


def _named() -> list[tuple[str, str, str]]:
    """Column, module and a word of the test's name (empty for none) of each test that the page names."""
    rows = re.findall(r"^\| [^|]+ \|([^|]*)\|([^|]*)\|$", _PAGE, flags=re.MULTILINE)
    cells = [cell for row in rows for cell in zip(_FOLDERS, row, strict=True)]
    return [
        (column, module, word)
        for column, cell in cells
        for module, words in re.findall(r"`(test_\w+)`(?:: ([^;`|]+))?", cell)
        for word in (words.strip().split(", ") if words else [""])
    ]


@pytest.mark.parametrize(("column", "module", "word"), sorted(set(_named())))
def test_a_fault_is_shown_by_a_test_that_exists(column: str, module: str, word: str) -> None:
    files = [file for folder in _FOLDERS[column] for file in (ROOT / folder).rglob(f"{module}.py")]
    assert len(files) == 1
    assert word.replace(" ", "_") in files[0].read_text()


def test_the_page_of_faults_has_all_its_rows() -> None:
    assert len(_named()) > 40
