"""Sends cache entries to the workers that use their samples after a regroup.

This happens in the background, over one connection for each receiver. If an entry is lost, the receiver computes it
again. A receiver accepts entries only from senders that have its token. Workers publish their tokens in the store of
the generation's process group.
"""

import contextlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

import torch
from torch import Tensor

from pipetransformer.data import as_bytes

from .digest import Key
from .store import TieredStore

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<IQ")
_TOKEN_CHARACTERS = 32
_LARGEST_NAME = 4096
#: A connection without progress for this time is closed.
_TIMEOUT_SECONDS = 10.0


class EntryTaker(Protocol):
    """Takes the entries that other workers send."""

    def accept(self, key: Key, entry: Tensor) -> None:
        """Keep the entry, or drop it. The receiver calls this in a thread for each sender."""
        ...


class EntryReceiver:
    """Listens on a port of `host`, and passes each entry that it receives to `taker`, in its own threads.

    Attributes:
        address: host, port and token as JSON, which a sender needs.
    """

    def __init__(self, host: str, largest_entry: int, taker: EntryTaker) -> None:
        self._taker = taker
        self._largest_entry = largest_entry
        self._token = secrets.token_hex(_TOKEN_CHARACTERS // 2)
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._server = socket.create_server((host, 0), family=family)
        self.address = json.dumps([host, self._server.getsockname()[1], self._token])
        threading.Thread(target=self._listen, name="cache-receiver", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="cache-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_TIMEOUT_SECONDS)
            with connection, connection.makefile("rb") as stream:
                if hmac.compare_digest(stream.read(_TOKEN_CHARACTERS), self._token.encode()):
                    while (received := self._receive(stream)) is not None:
                        self._taker.accept(*received)
        except (OSError, ValueError) as error:
            logger.warning("cache: receiving entries from a peer failed: %s", error)

    def _receive(self, stream: IO[bytes]) -> tuple[Key, Tensor] | None:
        """Read the next entry; None after the last one."""
        header = stream.read(_HEADER.size)
        if not header:
            return None
        if len(header) < _HEADER.size:
            raise ValueError("the connection closed within an entry")
        name_size, size = _HEADER.unpack(header)
        if name_size > _LARGEST_NAME or size > self._largest_entry:
            raise ValueError(f"an entry of {size} bytes with a name of {name_size} bytes is too large")
        name, payload = json.loads(stream.read(name_size)), bytearray(stream.read(size))
        try:
            entry = torch.frombuffer(payload, dtype=getattr(torch, name["dtype"])).view(name["shape"])
            key = Key(bytes.fromhex(name["prefix"]), name["split"], name["sample"], name["augmentation"])
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"cannot read the entry named {name}: {error}") from error
        return key, entry


class EntrySender:
    """Moves entries from a store to other workers, one worker after another, in a thread.

    It also removes entries that it could not send, unless it was stopped.
    """

    def __init__(self, entries: Mapping[str, Sequence[Key]], store: TieredStore) -> None:
        """`entries` are the keys to send, by the receiver's address. With an empty address they are only removed."""
        self._entries = entries
        self._store = store
        self._stopped = threading.Event()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="cache-sender", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sending. Entries that are not sent yet stay in the store."""
        self._stopped.set()
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the connection has already ended
                self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def wait(self, seconds: float) -> None:
        """Wait until all entries are sent, at most `seconds`."""
        self._thread.join(seconds)

    def _run(self) -> None:
        for address, keys in self._entries.items():
            try:
                if address:
                    self._send(address, keys)
            except OSError as error:
                logger.warning("cache: sending entries to a peer failed: %s", error)
            if self._stopped.is_set():
                return
            for key in keys:
                self._store.remove(key)

    def _send(self, address: str, keys: Sequence[Key]) -> None:
        host, port, token = json.loads(address)
        with socket.create_connection((host, port), timeout=_TIMEOUT_SECONDS) as connection:
            self._connection = connection
            connection.sendall(token.encode())
            for key in keys:
                if self._stopped.is_set():
                    return
                entry = self._store.peek(key)
                if entry is not None:
                    name = {
                        "prefix": key.prefix.hex(),
                        "split": key.split,
                        "sample": key.sample,
                        "augmentation": key.augmentation,
                        "dtype": str(entry.dtype).removeprefix("torch."),
                        "shape": list(entry.shape),
                    }
                    line = json.dumps(name).encode()
                    connection.sendall(_HEADER.pack(len(line), entry.nbytes) + line)
                    connection.sendall(as_bytes(entry))
                    self._store.remove(key)
