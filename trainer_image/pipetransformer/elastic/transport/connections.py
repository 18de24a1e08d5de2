"""Finds the TCP connections that a generation opens, so that another thread can end waits on them. Linux only.

A blocked call of gloo or a TCPStore ends only when its connection closes; aborting a gloo group does not end it. Shut
sockets make every blocked call fail as if a peer had died. torch gives no file descriptors, so they are found by
comparing what was open before and after. A group in the making has no socket to shut, and waits for peers five times
its timeout. It therefore waits in a thread that can be left behind.
"""

import contextlib
import math
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")

_DESCRIPTORS = "/proc/self/fd"
_LOOK_SECONDS = 0.05


class Opening(ABC, Generic[T]):
    """Something that opens connections. A thread makes it, which may be left behind."""

    @abstractmethod
    def make(self) -> T:
        """Wait for peers to connect, and return the result."""

    def drop(self, late: T) -> None:
        """Drop a result that came too late; by default the garbage collector does."""

    def fulfil(self, made: Future[T]) -> None:
        """Make it, and put the result or the error into `made`."""
        try:
            made.set_result(self.make())
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            made.set_exception(error)

    def drop_late(self, made: Future[T]) -> None:
        """Drop the result of `made`, if there is one."""
        if made.exception() is None:
            self.drop(made.result())


class Connections:
    """Sockets that were opened in `opening`. One thread opens them; any thread may `shut` them.

    Args:
        own_port: port of the store that this process hosts. The connections that it accepts belong to others.

    Attributes:
        after_shut: ends waits that use no socket. It is called once, in a thread of its own because it may hang, and
            after the sockets are shut, so that a wait that ends cannot report a success to others.
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
        """Own every connection that is made in the block."""
        with self._lock:
            self._before = _sockets()
        try:
            yield
        finally:
            with self._lock:
                self._opened |= _sockets() - self._before
                self._before = None

    def connect(self, opening: Opening[T], seconds: float = math.inf) -> T:
        """Return what `opening` makes, and own every connection that it opens.

        Args:
            opening: what to make.
            seconds: how long to wait for the result.

        Raises:
            ConnectionAbortedError: `shut` was called meanwhile.
            TimeoutError: it takes longer. The connections are shut.
        """
        deadline = time.monotonic() + seconds
        made: Future[T] = Future()
        with self.opening():
            threading.Thread(target=opening.fulfil, args=(made,), name="connect", daemon=True).start()
            while not wait([made], _LOOK_SECONDS).done:
                if late := not self.is_shut and time.monotonic() > deadline:
                    self.shut()
                if self.is_shut:
                    made.add_done_callback(opening.drop_late)
                    error = TimeoutError if late else ConnectionAbortedError
                    raise error("given up before all peers had connected")
        return made.result()

    @property
    def is_shut(self) -> bool:
        """Whether `shut` was called, after which nothing may be opened."""
        return self._shut_once.is_set()

    def shut(self) -> None:
        """Break all open connections, and those that are just being opened."""
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


def _is_tcp(opened: socket.socket) -> bool:
    """Whether a socket is a TCP connection. Other threads open other sockets, such as to a process that reads
    samples."""
    inet = opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM
    return inet and not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _sockets() -> set[tuple[int, str]]:
    """Return (descriptor, inode) of every open socket, because a descriptor's number may be reused."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - half the time of pathlib, and it is in the pause
        with contextlib.suppress(OSError):
            target = os.readlink(f"{_DESCRIPTORS}/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found
