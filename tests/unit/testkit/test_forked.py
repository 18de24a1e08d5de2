"""Forks of a test run."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testkit.forked import Forked
from tools.devcluster.process import wait_until

PROGRAM = """
import multiprocessing, os, pathlib, sys, time
from tests.testkit.forked import Forked
fork = Forked(time.sleep, dict(os.environ), pathlib.Path(sys.argv[1]), 60)
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(60)
"""


def test_a_fork_ends_with_a_run_that_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path / "log"], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        fork = os.pidfd_open(int(run.stdout.readline()))
        wait_until((tmp_path / "log").exists, "the fork has begun")
        run.kill()

        ended, _, _ = select.select([fork], [], [], 10)

    os.close(fork)
    assert ended, "it outlived its run"


def test_a_fork_does_not_see_the_arguments_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest", "tests"])
    fork = Forked(_arguments, dict(os.environ), tmp_path / "log")
    assert fork.join(60) == 0
    assert (tmp_path / "log").read_text() == f"{[__name__]}\n"


def _arguments() -> None:
    print(sys.argv)
