"""The order of the unit tests, and a store that several need."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.testkit.object_store import ObjectStore  # takes a second

_TRAINER = Path(__file__).parent / "trainer"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that train come first: they are the longest, and one that begins last would keep one process busy."""
    items.sort(key=lambda item: _TRAINER not in item.path.parents)


@functools.cache
def _object_store() -> "ObjectStore":
    from tests.testkit.object_store import ObjectStore

    return ObjectStore()


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator["ObjectStore"]:
    """A store that whoever in this process, or in one that it starts, speaks S3 finds."""
    store = _object_store()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    store.forget_clients()
    yield store
    store.forget_clients()
