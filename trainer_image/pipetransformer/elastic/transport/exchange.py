"""Gathers a few hundred bytes from all ranks, on connections that serve nothing else.

The calling thread sends and receives on plain TCP connections. gloo has a thread for its connections. It would wake for
each message, which costs more than the message (`docs/decisions/0015`).
"""

import datetime
import secrets
import socket
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from operator import add
from typing import Protocol

#: Ranks send and receive in turns, and this many bytes at a time. A connection can hold this many unread bytes.
#: Otherwise all ranks could wait to send, and none would receive.
_PART_BYTES = 1 << 14
_TOKEN_BYTES = 8
#: How long a connection may take to say what it is for.
_INTRODUCTION_SECONDS = 5.0


class Exchange:
    """Gathers values from all ranks. Each rank calls it as often as the other ranks, with as many values.

    Each time, a rank sends ceil(log2(ranks)) messages one after another (the concatenation of Bruck et al., 1997).
    Without arguments, it is the exchange of a worker that is alone.

    Args:
        rank: this worker's rank.
        size: number of ranks.
        sending: for each message, a connection to the rank that gets it.
        receiving: for each message, a connection to the rank that it comes from.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        sending: Sequence[socket.socket] = (),
        receiving: Sequence[socket.socket] = (),
    ) -> None:
        self._rank, self._size = rank, size
        self._sending, self._receiving = sending, receiving

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of each rank, in the order of ranks.

        Raises:
            RuntimeError: a connection broke, or a rank did not take part within the timeout.
        """
        own = array("d", values).tobytes()
        # The rows of this rank, then of the ranks after it.
        rows = memoryview(bytearray(self._size * len(own)))
        rows[: len(own)] = own
        try:
            for held, to, source in zip(_distances(self._size), self._sending, self._receiving, strict=True):
                count = min(held, self._size - held) * len(own)
                taken = rows[held * len(own) :]
                for start in range(0, count, _PART_BYTES):
                    end = min(start + _PART_BYTES, count)
                    to.sendall(rows[start:end])
                    _receive(source, taken[start:end])
        except OSError as error:
            raise RuntimeError(f"the exchange with another worker broke: {error}") from error
        flat = list(rows.cast("d"))
        found = [flat[start : start + len(values)] for start in range(0, len(flat), len(values))]
        return found[-self._rank :] + found[: -self._rank]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum over all ranks. Each rank adds the rows in the same order, so all get the same bits on any processor.

        Raises:
            RuntimeError: as for `gather`.
        """
        if self._size == 1:
            return list(values)
        total, *others = self.gather(values)
        for row in others:
            total = list(map(add, total, row))
        return total

    def close(self) -> None:
        """Close the connections. A rank that waits for this one then fails at once."""
        for connection in (*self._sending, *self._receiving):
            connection.close()


class KeyValues(Protocol):
    """The methods of torch's stores that `open_exchange` uses."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


def open_exchange(store: KeyValues, rank: int, size: int, address: str, timeout: datetime.timedelta) -> Exchange:
    """Connect this worker with the ranks that it exchanges messages with. All ranks call this.

    Args:
        store: where the ranks meet.
        rank: this worker's rank.
        size: number of ranks.
        address: address of this process for other workers.
        timeout: how long each operation waits for another rank, now and later.

    Raises:
        RuntimeError, OSError: a rank did not come in time, or a connection broke.
    """
    seconds = timeout.total_seconds()
    family, *_, place = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    distances = list(_distances(size))
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(place[:2], family=family, backlog=128))
        server.settimeout(seconds)
        host, port = server.getsockname()[:2]
        token = secrets.token_bytes(_TOKEN_BYTES)
        store.set(f"exchange/{rank}", f"{host} {port} {token.hex()}")
        sending: list[socket.socket] = []
        receiving: dict[int, socket.socket] = {}
        # The connections that this worker sends on. The first bytes are the receiver's token and the message's number.
        for number, distance in enumerate(distances):
            host, port, its_token = store.get(f"exchange/{(rank - distance) % size}").decode().split()
            connection = opened.enter_context(socket.create_connection((host, int(port)), seconds))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(bytes.fromhex(its_token) + bytes([number]))
            sending.append(connection)
        # The connections that it receives on, in the order in which they come. Others may connect to any open port.
        while len(receiving) < len(distances):
            connection = opened.enter_context(server.accept()[0])
            said = _introduction(connection)
            if said[:-1] == token:
                connection.settimeout(seconds)
                receiving[said[-1]] = connection
            else:
                connection.close()
        server.close()
        opened.pop_all()
    return Exchange(rank, size, sending, [receiving[number] for number in range(len(distances))])


def _distances(size: int) -> Iterator[int]:
    """For each message, the distance in ranks that it goes. It is also the number of rows that a rank holds before."""
    distance = 1
    while distance < size:
        yield distance
        distance *= 2


def _introduction(connection: socket.socket) -> bytes:
    """The first bytes of a connection; empty if they do not come."""
    connection.settimeout(_INTRODUCTION_SECONDS)
    first = bytearray(_TOKEN_BYTES + 1)
    try:
        _receive(connection, memoryview(first))
    except OSError:
        return b""
    return bytes(first)


def _receive(source: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer.

    Raises:
        OSError: the connection broke.
    """
    while buffer:
        count = source.recv_into(buffer)
        if not count:
            raise ConnectionError("it closed its connection")
        buffer = buffer[count:]
