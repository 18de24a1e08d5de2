"""Runs the command line in this process."""

import sys

import pytest

from pipetransformer_client.cli import main


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs the command line and returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["pipetransformer", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
