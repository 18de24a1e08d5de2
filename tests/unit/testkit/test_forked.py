"""Forks of a test run that is killed."""

import os
import select
import subprocess
import sys
from pathlib import Path

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
