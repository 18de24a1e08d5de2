"""Runs commands to their end, and daemons that outlive this tool.

A daemon's pid file also holds the start time of the process, so that a reused pid is never signalled.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path


def say(text: str) -> None:
    """Print progress to stderr, because stdout is for results."""
    print(text, file=sys.stderr, flush=True)


class CommandError(Exception):
    """A command failed. The message holds the command and the end of its output."""


Argument = str | Path


def run(
    command: Sequence[Argument],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> str:
    """Run `command` to its end and return its stdout. Raises `CommandError` with the end of its output if it fails."""
    done = subprocess.run(
        [str(a) for a in command], env=env, cwd=cwd, input=stdin, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}".strip()
        raise CommandError(f"`{' '.join(str(a) for a in command)}` ended with {done.returncode}:\n{said}")
    return done.stdout


def succeeds(command: Sequence[Argument], *, env: Mapping[str, str] | None = None) -> bool:
    """Whether `command` exits with 0. Its output is discarded."""
    return (
        subprocess.run(
            [str(a) for a in command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode
        == 0
    )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder`, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically, so that a full disk or a kill leaves the old one."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = 60, every: float = 0.1) -> None:
    """Return as soon as `condition()` holds. Raises `TimeoutError` with `what` if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not so after {seconds:g} s")
        time.sleep(every)


def answers(url: str, context: ssl.SSLContext | None = None) -> bool:
    """Whether a server on loopback answers with 200. Ignores proxies in the environment."""
    direct = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*direct).open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _start_time(pid: int) -> str | None:
    """Kernel's start time of a process; None if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


class Daemon:
    """A background process with its pid file and log in `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.pid_file = folder / f"{name}.pid"
        self.log = folder / f"{name}.log"

    @property
    def pid(self) -> int | None:
        """Process id while the process runs. None otherwise, also if a full disk left the pid file empty."""
        pid, _, started = self.pid_file.read_text().partition(" ") if self.pid_file.exists() else ("", "", "")
        return int(pid) if pid and _start_time(int(pid)) == started else None

    def start(self, command: Sequence[Argument], *, env: Mapping[str, str] | None = None) -> None:
        """Start the process in its own session unless it already runs."""
        if self.pid is not None:
            return
        self.pid_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [str(a) for a in command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            write_whole(self.pid_file, f"{process.pid} {_start_time(process.pid)}")
        except OSError:  # the disk is full
            process.kill()
            process.wait()
            raise

    def require_alive(self) -> None:
        """Raise `CommandError` with the end of the log if the process has ended."""
        if self.pid is None:
            tail = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""
            raise CommandError(f"{self.name} died; the end of {self.log}:\n{tail}")

    def wait_ready(self, ready: Callable[[], bool], *, seconds: float = 60) -> None:
        """Return once `ready()` holds. Raises at once if the process ends before."""

        def alive_and_ready() -> bool:
            self.require_alive()
            return ready()

        wait_until(alive_and_ready, f"{self.name} ready (log: {self.log})", seconds=seconds)

    def stop(self, *, seconds: float = 10) -> None:
        """Send SIGTERM, then SIGKILL after `seconds`. Does nothing if the process does not run."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            try:
                wait_until(lambda: self.pid is None, f"{self.name} ended", seconds=seconds)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: self.pid is None, f"{self.name} killed", seconds=seconds)
        self.pid_file.unlink(missing_ok=True)
