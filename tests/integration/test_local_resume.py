"""A local run that is interrupted, by its user or by the machine, goes on by the same command."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.testkit.operator.builders import make_job

pytestmark = pytest.mark.timeout(240)
STEPS = 300


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "pipetransformer_client", "run", "job.yaml", "--run-dir", "run", *options]
    return subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_until(condition: Callable[[], bool], run: subprocess.Popen[str]) -> None:
    while not condition():
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)


def steps_of(folder: Path) -> list[int]:
    file = folder / "run" / "steps.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def children(parent: int) -> list[int]:
    """Processes that it has started and that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, father = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(father) == parent and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_an_interrupted_local_run_resumes_by_the_same_command(tmp_path: Path) -> None:
    """First its user stops it, then it is killed with all its workers; at last it finishes."""
    job = make_job("small").drop("training.epochs").set("training.steps", STEPS).set("checkpoint.everySteps", 20)
    job = job.set("model", {"name": "vit", "numLayers": 2, "hiddenSize": 16, "mlpSize": 16}).drop("podTemplate")
    manifest = job.set("checkpoint.location", "/mnt/checkpoints").drop("acceleratorResource").manifest()
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    record = tmp_path / "run" / "steps.jsonl"

    run = start(tmp_path)
    wait_until(lambda: record.exists() and len(steps_of(tmp_path)) > 5, run)
    run.send_signal(signal.SIGINT)
    told = run.communicate()[0]
    assert run.returncode == 130
    first = steps_of(tmp_path)[-1]
    assert f"The same command resumes at step {first + 1}" in told

    run = start(tmp_path)
    wait_until(lambda: max(steps_of(tmp_path), default=0) > first + 25, run)
    workers = children(run.pid)
    for process in (*workers, run.pid):
        os.kill(process, signal.SIGKILL)
    run.communicate()
    assert workers

    told, _ = (run := start(tmp_path)).communicate()
    assert run.returncode == 0, told
    assert re.search(r"Resuming: from the checkpoint at step \d+", told)
    assert steps_of(tmp_path) == list(range(STEPS))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["samples_lost"], summary["samples_repeated"], summary["audited_from_step"]) == (0, 0, 0)
