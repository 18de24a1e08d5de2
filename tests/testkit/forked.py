"""Programs as processes that are forked from a server which has imported them: a start takes no second."""

import asyncio
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path

#: What a trainer needs that does not come with its first import.
TRAINER = ("pipetransformer.worker.trainer", "pipetransformer.schedules.from_torch", "sklearn.datasets")
_imported: dict[str, None] = {}


def context(*modules: str) -> ForkServerContext:
    """The fork server of this process, which its first fork starts; it has imported what was named until then."""
    server = multiprocessing.get_context("forkserver")
    _imported.update(dict.fromkeys(modules))
    server.set_forkserver_preload(list(_imported))
    return server


def begin() -> None:
    """A fork's first line.

    The fork is killed when the tests end, however they do: its server would wait for it. Its collections of garbage
    leave alone what the server imported. Otherwise each fork visits half a million objects, and copies their memory.
    """
    gc.freeze()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-tests", daemon=True).start()


class Forked:
    """A process that has begun.

    Args:
        program: what it runs; returns the exit code.
        environment: of the process.
        log: gets what it prints.
        arguments: of the program.
    """

    def __init__(
        self, program: Callable[..., int | None], environment: Mapping[str, str], log: Path, *arguments: object
    ) -> None:
        server = context(program.__module__)
        self._process = server.Process(target=_run, args=(program, dict(environment), str(log), arguments), daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Its exit code, below zero for a signal; None while it runs."""
        return self._process.exitcode

    def join(self, seconds: float | None = None) -> int:
        """Waits for its end; returns the exit code."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"the process still runs after {seconds} s")
        return code

    async def wait(self) -> int:
        """As `join`, while the event loop goes on."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        own = os.dup(self._process.sentinel)
        loop.add_reader(own, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(own)
            os.close(own)
        return self.join()

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it still runs."""
        if self._process.exitcode is None:
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Ends it without notice, if it still runs."""
        self._process.kill()


def _run(
    program: Callable[..., int | None], environment: Mapping[str, str], log: str, arguments: tuple[object, ...]
) -> None:
    begin()
    sys.argv = [program.__module__]  # otherwise it has the arguments of the tests
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.exit(program(*arguments))
