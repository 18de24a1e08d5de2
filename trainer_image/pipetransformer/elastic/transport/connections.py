"""The TCP connections that a generation opens, so that another thread can break what waits on them.

A blocked call of gloo or of a TCPStore notices a closed connection at once, and nothing else: aborting a gloo group
unblocks nobody while anyone refers to it. So whoever must end such a wait shuts the sockets down, and every blocked
call fails as if a peer had died. torch hands out no file descriptors, so they are found by what was opened meanwhile.
Linux only.

One wait has no socket that could be shut: a group that is being made waits for its peers to connect, five times as long
as its timeout says. It waits in a thread, which is left behind.
"""

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

T = TypeVar("T")

_DESCRIPTORS = "/proc/self/fd"
_LOOK_SECONDS = 0.05


class Connections:
    """Sockets opened inside of `opening`. One thread opens, any may `shut`.

    Args:
        own_port: port of the store that this process hosts, whose accepted connections belong to others.

    Attributes:
        after_shut: ends waits that hang on no socket. It is called once, in a thread of its own, for it may hang; and
            only after the sockets are shut, so that nobody who waits so can tell others of something that never came.
    """

    def __init__(self, own_port: int = 0) -> None:
        self._own_port = own_port
        self._lock = threading.Lock()
        self._before: set[tuple[int, str]] | None = None
        self._opened: set[tuple[int, str]] = set()
        self._shut_once = threading.Event()
        self.after_shut: Callable[[], None] | None = None

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Own every connection that is made inside."""
        with self._lock:
            self._before = _sockets()
        try:
            yield
        finally:
            with self._lock:
                self._opened |= _sockets() - self._before
                self._before = None

    def connect(self, make: Callable[[], T], drop: Callable[[T], None], seconds: float = math.inf) -> T:
        """What `make` makes, with every connection that it opens.

        Args:
            make: waits for peers to connect.
            drop: takes what `make` made after nobody wanted it any more.
            seconds: how long to wait for it.

        Raises:
            ConnectionAbortedError: `shut` was called meanwhile.
            TimeoutError: it takes longer. The connections are shut.
        """
        deadline = time.monotonic() + seconds
        made: Future[T] = Future()
        with self.opening():
            threading.Thread(target=_fulfil, args=(made, make), name="connect", daemon=True).start()
            while not wait([made], _LOOK_SECONDS).done:
                if late := not self.is_shut and time.monotonic() > deadline:
                    self.shut()
                if self.is_shut:
                    made.add_done_callback(partial(_drop_late, drop))
                    error = TimeoutError if late else ConnectionAbortedError
                    raise error("given up before all peers had connected")
        return made.result()

    @property
    def is_shut(self) -> bool:
        """Whether `shut` was called: nothing new shall be opened."""
        return self._shut_once.is_set()

    def shut(self) -> None:
        """Break what is open, and what is being opened just now."""
        self._shut_once.set()
        with self._lock:
            present = _sockets()
            opened = self._opened if self._before is None else self._opened | (present - self._before)
            for descriptor, _ in opened & present:
                self._shut(descriptor)
        after, self.after_shut = self.after_shut, None
        if after is not None:
            threading.Thread(target=after, name="after-shut", daemon=True).start()

    def _shut(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            copy = os.dup(descriptor)
            with socket.socket(fileno=copy) as connection:
                if _is_tcp(connection) and connection.getsockname()[1] != self._own_port:
                    connection.shutdown(socket.SHUT_RDWR)


def _fulfil(made: Future[T], make: Callable[[], T]) -> None:
    try:
        made.set_result(make())
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is wanted
        made.set_exception(error)


def _drop_late(drop: Callable[[T], None], made: Future[T]) -> None:
    if made.exception() is None:
        drop(made.result())


def _is_tcp(opened: socket.socket) -> bool:
    """Whether it is a TCP connection. Other threads open sockets, too: to a process that reads samples, or of an event
    loop."""
    inet = opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM
    return inet and not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _sockets() -> set[tuple[int, str]]:
    """(descriptor, inode) of every open socket: a descriptor's number alone may be used again."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - half the time of pathlib, and it is in the pause
        with contextlib.suppress(OSError):
            target = os.readlink(f"{_DESCRIPTORS}/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found
