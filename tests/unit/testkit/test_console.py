"""What is read out of a document as a command, and which documents' commands somebody runs."""

from pathlib import Path

import pytest

from tests.testkit.console import Command, commands


def test_commands_are_read_with_their_section_and_the_lines_that_go_on(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "# Page\n```console\n$ first\n$ second \\\n    --more\n```\n```yaml\n# no heading\n```\n"
        "## Part\n```bash\nnot typed\n```\n```console\n$ third\n```\n"
    )
    assert commands(document) == [
        Command("Page", "first"),
        Command("Page", "second \\\n    --more"),
        Command("Part", "third"),
    ]


def test_output_in_a_console_block_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("```console\n$ first\nits output\n```\n")
    with pytest.raises(ValueError, match=r"page\.md: 'its output' is in a console block"):
        commands(document)
