"""Reads and appends to files of JSON lines. When the leader changes, another process continues to append to a file.

All functions raise `StorageError` if they cannot read or write.
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
    """Append one object to the file by a single system call, so that lines of two writers never mix."""
    with storing(f"the run's record in {path}"), _open(path) as file:
        _write(file, line)


class Appender:
    """Appends objects to one file, which stays open. Each is written by a single system call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def append(self, line: Mapping[str, Any]) -> None:
        """Append one object."""
        with storing(f"the run's record in {self._path}"):
            if self._file is None:
                self._file = _open(self._path)
            _write(self._file, line)


def _open(path: Path) -> FileIO:
    """Open a file to append. Removes an incomplete last line, which a full disk or a killed writer may have left."""
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
    """Yield the objects of a file in order; none if the file does not exist. Skips an incomplete last line, and damaged
    lines with a warning."""
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
        logger.warning("%s: skipped %d damaged lines", path, damaged)


def cut_off(path: Path, unwanted: Callable[[dict[str, Any]], bool]) -> None:
    """Remove objects from the end of the file until `unwanted` is false for the last one. Reads no earlier objects. The
    file must not be empty."""
    with storing(f"the run's record in {path}"), path.open("r+b") as file:
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
    """The last object of a file; None if the file is missing or empty. Reads only the end of the file."""
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
    """The object in a line; None if the line is damaged."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        return found if isinstance(found, dict) else None
    return None
