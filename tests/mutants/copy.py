"""A copy of the working tree, in which one mutant at a time is tried."""

import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .entries import ROOT

_PACKAGES = ("contract", "operator", "client", "trainer_image")


class Copy:
    """The files of the tree at `root` that git tracks or would track, as they are on disk."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder, self.root = folder, root
        self.log = folder.with_suffix(".log")
        listed = subprocess.run(
            ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root, capture_output=True, check=True, text=True,
        )  # fmt: skip
        for name in set(listed.stdout.split("\0")) - {""}:
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)

    def write(self, file: str, source: str) -> None:
        """Replace a file's text."""
        path = self.folder / file
        path.write_text(source)
        # Two versions of one size, written in the same second, would share compiled code.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


@dataclass(slots=True)
class ForkedTests:
    """pytest in a process that is forked from this one, which has imported the libraries that take long.

    Attributes:
        code: pytest's exit code, None while it runs; below zero where a signal ended it.
        seconds: since it began.
        late: it was ended because its limit had passed.
    """

    copy: Copy
    selection: Iterable[str]
    limit_seconds: float
    code: int | None = None
    late: bool = False
    _pid: int = 0
    _began: float = 0.0

    def start(self) -> None:
        self._began = time.monotonic()
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            self._run()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def ended(self) -> bool:
        """Whether it has; past its limit it is ended, with all that it has started."""
        if not self.late and self.seconds > self.limit_seconds:
            self.late = True
            self.kill()
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
        return pid != 0

    def kill(self) -> None:
        """End pytest, and the workers that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)

    @property
    def output(self) -> str:
        """What pytest printed."""
        return self.copy.log.read_text(errors="replace")

    def _run(self) -> None:
        """In the child: never returns."""
        code = 70
        try:
            os.setsid()
            log = os.open(self.copy.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            paths = [str(self.copy.folder / package) for package in _PACKAGES]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            os.chdir(self.copy.folder)
            sys.path[:] = [*paths, *(path for path in sys.path if path not in ("", str(self.copy.root)))]
            # This program, and what a library has loaded by an entry point: of the working tree, and not of the copy.
            for name in [name for name in sys.modules if name.startswith(("pipetransformer", "tests"))]:
                del sys.modules[name]
            importlib.invalidate_caches()
            import pytest

            options = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-profile", "mutants"]
            code = int(pytest.main([*options, *self.selection]))
        finally:
            sys.stdout.flush()
            os._exit(code)


def import_libraries() -> None:
    """What tests import that is not ours: once here, and not once a mutant."""
    for name in (
        "hypothesis.strategies", "kopf", "kubernetes.aio.client", "pytest", "scipy.optimize", "sklearn.datasets",
        "torch._dynamo", "torch.distributed.elastic.rendezvous", "torch.distributed.pipelining",
    ):  # fmt: skip
        importlib.import_module(name)
