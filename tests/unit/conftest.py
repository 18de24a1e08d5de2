"""The order of the unit tests."""

from pathlib import Path

import pytest

_TRAINER = Path(__file__).parent / "trainer"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that train come first: they are the longest, and one that begins last would keep one process busy."""
    items.sort(key=lambda item: _TRAINER not in item.path.parents)
