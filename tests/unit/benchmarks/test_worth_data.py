"""The fetcher of pinned packages, with a made-up client in place of npm, pip and apt-get."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.worth import data

_CONTENT = b"an archive"


def _package(content: bytes = _CONTENT, file: str = "package-1.0.tgz", client: str = sys.executable) -> data.Package:
    """A package whose client is a Python program that writes one file."""
    writes = f"import pathlib; pathlib.Path({file!r}).write_bytes({content!r})"
    return data.Package("package-1.0.tgz", hashlib.sha256(_CONTENT).hexdigest(), (client, "-c", writes))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_package_is_fetched_once_and_then_read_from_the_cache() -> None:
    path = data.fetch(_package())
    assert path.read_bytes() == _CONTENT
    assert data.fetch(_package(client="no-such-client")) == path


def test_a_damaged_package_in_the_cache_is_fetched_again() -> None:
    data.fetch(_package()).write_bytes(b"half an arch")
    assert data.fetch(_package()).read_bytes() == _CONTENT


def test_an_archive_that_is_not_the_pinned_one_is_refused_and_not_kept() -> None:
    with pytest.raises(data.ChangedError, match=r"package-1.0.tgz has SHA-256 .* is pinned"):
        data.fetch(_package(b"another archive"))
    assert list(data.folder().iterdir()) == []


def test_a_registry_out_of_reach_is_said_with_the_client_and_its_last_words() -> None:
    fails = data.Package("package-1.0.tgz", "0", (sys.executable, "-c", "raise SystemExit('no route to the registry')"))
    with pytest.raises(data.UnreachableError, match="failed: no route to the registry"):
        data.fetch(fails)
    with pytest.raises(data.UnreachableError, match=r"no-such-client .* does not run here"):
        data.fetch(_package(client="no-such-client"))
    with pytest.raises(data.UnreachableError, match="wrote other"):
        data.fetch(_package(file="other.tgz"))


def test_an_idx_file_gives_its_array_and_another_file_is_refused() -> None:
    content = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6])
    assert np.array_equal(data.idx(content), [[1, 2, 3], [4, 5, 6]])
    with pytest.raises(ValueError, match="begins with 50617274"):
        data.idx(b"Part of a text")


def test_tags_are_cut_off_at_the_last_slash() -> None:
    assert data.untagged("\n\n\tThe/at and/or/cc 1/2/cd ./.\n") == ("The", "and/or", "1/2", ".")
