"""Runs without the picture of their timeline, which takes the processor as long to draw as a small run to train."""

from typing import Any
from unittest import mock

from pipetransformer.record import RunRecord


def undrawn() -> Any:
    """While this is entered, or from its `start`, runs of this process end without one."""
    return mock.patch.object(RunRecord, "_draw")
