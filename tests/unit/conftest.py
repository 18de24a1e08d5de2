"""The order of the unit tests, and what several need: a store, the documentation's site and a browser."""

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testkit import ROOT
from tools.browser import Browser, running
from tools.devcluster import debian

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


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link or anchor to nowhere, or a page that is not in the navigation, ends it."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium; a test that needs one is skipped on a machine without."""
    if debian.lacking(debian.BROWSER):
        pytest.skip("chromium is neither on this machine nor in the cache; `make programs` obtains it")
    with running() as browser:
        yield browser
