"""JSON lines that several processes may append to, one after another: the leader can change between generations.

What cannot be written, or read, raises `StorageError`.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from ..errors import storing

_MAX_LINE = 1 << 16
_encode = json.JSONEncoder(allow_nan=False).encode


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one object to a file with a single write, so that a reader never sees half of it followed by another's."""
    with storing(f"the run's record in {path}"), _open(path) as file:
        _write(file, line)


class Appender:
    """Adds many objects to one file, which it keeps open from the first on. Each is a single write to the system."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def append(self, line: Mapping[str, Any]) -> None:
        """As `append`."""
        with storing(f"the run's record in {self._path}"):
            if self._file is None:
                self._file = _open(self._path)
            _write(self._file, line)


def _open(path: Path) -> FileIO:
    """To append. A line that was torn, for the storage was full or its writer was killed, is removed."""
    file = FileIO(path, "a+")
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
    return file


def _write(file: FileIO, line: Mapping[str, Any]) -> None:
    content = f"{_encode(line)}\n".encode()
    if file.write(content) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order; none when it does not exist. A torn last line is left out."""
    with storing(f"the run's record in {path}"):
        content = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in content.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def keep(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Leave only the wanted objects in a file."""
    partial = path.with_name(f"{path.name}.partial")
    with storing(f"the run's record in {path}"):
        partial.unlink(missing_ok=True)
        partial.touch()
        for line in read(path):
            if wanted(line):
                append(partial, line)
        partial.replace(path)


def last(path: Path) -> dict[str, Any] | None:
    """The last object of a file, None when it has none; reads its end only."""
    with storing(f"the run's record in {path}"):
        if not path.exists():
            return None
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_LINE))
            whole = file.read().rpartition(b"\n")[0]
    newest = whole.rpartition(b"\n")[2]
    return json.loads(newest) if newest else None
