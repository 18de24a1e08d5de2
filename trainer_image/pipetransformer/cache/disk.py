"""Keeps entries in files without names. Each file has slots of one size.

A slot has a header (digest of the key, checksum of the data) and the data, so damaged data are always noticed. Only one
thread may call the methods. The kernel frees the files when the worker ends, also if it is killed.
"""

import hashlib
import logging
import os
import struct
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pipetransformer.data import as_bytes

from .digest import Key

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<16sI12x")


@dataclass
class _Slots:
    """A file of slots. `free` has the offsets of free slots; `end` is the offset after the last slot."""

    descriptor: int
    end: int = 0
    free: list[int] = field(default_factory=list)


class DiskFiles:
    """Writes and reads entries by key."""

    def __init__(self, scratch: Path | None) -> None:
        self._scratch = scratch
        self._files: dict[int, _Slots] = {}
        self._places: dict[Key, tuple[_Slots, int]] = {}

    def write(self, key: Key, entry: Tensor) -> bool:
        """Write `entry`, a CPU tensor. Returns whether that succeeded."""
        payload = as_bytes(entry)
        try:
            slots = self._slots(len(payload))
            size = _HEADER.size + len(payload)
            place = slots.free.pop() if slots.free else slots.end
            slots.end = max(slots.end, place + size)
            self._places[key] = (slots, place)
            header = _HEADER.pack(_digest(key), zlib.crc32(payload))
            written = os.pwritev(slots.descriptor, [header, payload], place)
        except OSError as error:
            logger.warning("cache: cannot write: %s", error)
            written = -1
        if written != _HEADER.size + len(payload):
            self.remove(key)
            return False
        return True

    def read(self, key: Key, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Read an entry of this shape and type; None if it is missing or damaged."""
        if key not in self._places:
            return None
        slots, place = self._places[key]
        header = bytearray(_HEADER.size)
        entry = torch.empty(shape, dtype=dtype)
        payload = as_bytes(entry)
        try:
            count = os.preadv(slots.descriptor, [header, payload], place)
        except OSError as error:
            logger.warning("cache: cannot read: %s", error)
            return None
        if count != _HEADER.size + len(payload) or _HEADER.unpack(header) != (_digest(key), zlib.crc32(payload)):
            return None
        return entry

    def remove(self, key: Key) -> None:
        """Free the slot of an entry, if there is one."""
        place = self._places.pop(key, None)
        if place is not None:
            place[0].free.append(place[1])

    def close(self) -> None:
        """Delete all files."""
        for slots in self._files.values():
            os.close(slots.descriptor)
        self._files.clear()
        self._places.clear()

    def _slots(self, size: int) -> _Slots:
        if size not in self._files:
            descriptor, path = tempfile.mkstemp(prefix="pipetransformer-cache-", dir=self._scratch)
            self._files[size] = _Slots(descriptor)
            Path(path).unlink()
        return self._files[size]


def _digest(key: Key) -> bytes:
    text = f"{key.prefix.hex()} {key.split} {key.sample} {key.augmentation}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
