"""A short soak: a few faults of different kinds over four jobs of real trainers. `make soak` does many."""

import subprocess
import sys

import pytest

from tools.devcluster.layout import REPOSITORY

FAULTS = 6
#: Draws six kinds, most of them to strike during a resize.
SEED = 188


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jobs_complete_with_each_sample_exactly_once_through_faults_at_random() -> None:
    command = [sys.executable, "-m", "tests.soak", "--faults", str(FAULTS), "--seed", str(SEED)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert f"{FAULTS} faults over" in done.stdout
