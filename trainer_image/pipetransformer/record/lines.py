"""JSON lines that several processes may append to, one after another: the leader can change between generations.

What cannot be written, or read, raises `StorageError`.
"""

import contextlib
import errno
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from pipetransformer.errors import storing

logger = logging.getLogger(__name__)

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
    """The objects of a file, in order; none when it does not exist. A torn last line is left out, and so is, with a
    warning, what is no object: storage may lose part of what was written."""
    damaged = 0
    with storing(f"the run's record in {path}"):
        if not path.exists():
            return
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                found = _decode(line)
                if found is not None:
                    yield found
                damaged += found is None
    if damaged:
        logger.warning("%s: %d damaged lines are left out", path, damaged)


def cut_off(path: Path, unwanted: Callable[[dict[str, Any]], bool]) -> None:
    """Remove the newest objects from a file, up to the first that is wanted; what is before that is not read."""
    with storing(f"the run's record in {path}"), path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return
        with mmap.mmap(file.fileno(), 0) as content:
            end = content.rfind(b"\n") + 1
            while end:
                begin = content.rfind(b"\n", 0, end - 1) + 1
                found = _decode(content[begin:end])
                if found is not None and not unwanted(found):
                    break
                end = begin
        file.truncate(end)


def last(path: Path) -> dict[str, Any] | None:
    """The last object of a file, None when it has none; reads its end only."""
    with storing(f"the run's record in {path}"):
        if not path.exists():
            return None
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return None
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
                while end:
                    begin = content.rfind(b"\n", 0, end - 1) + 1
                    if (found := _decode(content[begin:end])) is not None:
                        return found
                    end = begin
    return None


def _decode(line: bytes) -> dict[str, Any] | None:
    """The object of a line, None where it is none."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        return found if isinstance(found, dict) else None
    return None
