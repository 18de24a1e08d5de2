"""Finds the TCP connections that a generation opens, so that another thread can end waits on them. Linux only.

A blocked call of gloo or of a TCPStore ends only when its connection closes. Aborting a gloo group does not end it. If
its socket is shut, the call fails as if a peer had died. torch does not expose its file descriptors, so this module
compares the open sockets before and after. A group that waits for peers to connect has no socket to shut yet, and it
waits five times its timeout. So a separate thread makes the group, and the caller can abandon this thread.
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
#: Seconds between two checks whether `Connections.shut` was called.
_LOOK_SECONDS = 0.05


class Opening(ABC, Generic[T]):
    """Makes an object that opens connections, in a thread that the caller may abandon."""

    @abstractmethod
    def make(self) -> T:
        """Wait for peers to connect, and return the object."""

    def drop(self, late: T) -> None:
        """Drop an object that was made too late. By default this is left to the garbage collector."""

    def fulfil(self, made: Future[T]) -> None:
        """Put the result of `make`, or its error, into `made`."""
        try:
            made.set_result(self.make())
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            made.set_exception(error)

    def drop_late(self, made: Future[T]) -> None:
        """Drop the result of `made`, unless it is an error."""
        if made.exception() is None:
            self.drop(made.result())


class Connections:
    """The sockets that were opened in `opening`. One thread opens them, and any thread may `shut` them.

    Args:
        own_port: port of the store that this process hosts, 0 for none. Connections to this port are not shut, because
            other workers wait on them.

    Attributes:
        after_shut: ends waits that use no socket; None if there are none. It is called once, after the sockets are
            shut: otherwise a wait that it ends could pass for a success, and the worker could tell others so. It runs
            in a separate thread, because it may hang.
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
        """Take in every socket that is opened in the block."""
        with self._lock:
            self._before = _sockets()
        try:
            yield
        finally:
            with self._lock:
                self._opened |= _sockets() - self._before
                self._before = None

    def connect(self, opening: Opening[T], seconds: float = math.inf) -> T:
        """Return the object that `opening` makes, and take in the sockets that it opens.

        Args:
            opening: makes the object.
            seconds: how long to wait for the object.

        Raises:
            ConnectionAbortedError: `shut` was called before the object was made.
            TimeoutError: the object was not made in time. All sockets are shut.
            Exception: any error that `opening` raised.
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
                    raise error("the wait ended before all peers had connected")
        return made.result()

    @property
    def is_shut(self) -> bool:
        """Whether `shut` was called. Nothing may be opened after that."""
        return self._shut_once.is_set()

    def shut(self) -> None:
        """Break all connections, also those that are being opened now."""
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
            copy = os.dup(descriptor)  # the descriptor itself stays open, because torch closes it
            with socket.socket(fileno=copy) as connection:
                if _is_tcp(connection) and connection.getsockname()[1] != self._own_port:
                    connection.shutdown(socket.SHUT_RDWR)


def _is_tcp(opened: socket.socket) -> bool:
    """Whether a socket is a TCP connection. Other threads may open other sockets meanwhile, for example to a process
    that reads samples."""
    inet = opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM
    return inet and not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _sockets() -> set[tuple[int, str]]:
    """Return the descriptor and the inode of each open socket. The inode is needed because descriptors are reused."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - takes half the time of pathlib, in the pause
        with contextlib.suppress(OSError):
            target = os.readlink(f"{_DESCRIPTORS}/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found
