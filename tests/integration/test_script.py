"""One script of 20 lines, unchanged, in each of the four ways that it can be started."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.manifest import read_job
from pipetransformer_contract.api.status import ConditionType, JobStatus
from pipetransformer_operator.local.memory import MemoryStore
from pipetransformer_operator.local.run import run_job
from tests.testkit import ROOT
from tests.testkit.documented import documented
from tests.testkit.operator.builders import JobBuilder, make_job

pytestmark = pytest.mark.timeout(600)

SCRIPT = ROOT / "examples" / "train.py"
STEPS = 4 * 15
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def start(folder: Path, *command: str) -> str:
    """Run a command in a folder, and what it printed."""
    ran = subprocess.run([*command, str(SCRIPT)], cwd=folder, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def script_job() -> JobBuilder:
    """The manifest whose pods run the script: what the manifest cannot say is `script`."""
    return (
        make_job()
        .set("model", {"name": "script", "numLayers": 4})
        .set("data", {"name": "script"})
        .set("training", {"epochs": 4, "globalBatchSize": 100})
        .set("freeze", {"policy": "PaperSchedule", "alpha": 0.5, "startAfterEpochs": 1})
        .stages(2)
        .workers(2)
    )


async def operate(job: JobBuilder, run_dir: Path, *command: str) -> JobStatus:
    """Run a job by the operator's controller, with the script as the command of its pod template."""
    file = run_dir / "job.yaml"
    file.write_text(yaml.safe_dump(job.command(*command, str(SCRIPT)).manifest()))
    return await run_job(read_job(file, run_dir), run_dir)


def summary(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return content


def layouts(run_dir: Path) -> list[tuple[int, int]]:
    return [(entry["stages"], entry["pipelines"]) for entry in summary(run_dir)["generations"]]


def logs(run_dir: Path) -> list[str]:
    return [path.read_text()[-5000:] for path in run_dir.glob("logs/*")]


def check_run(run_dir: Path) -> None:
    """All steps, every sample of every epoch once, and a model that has learnt."""
    found = summary(run_dir)
    assert (found["steps"], found["samples_lost"], found["samples_repeated"]) == (STEPS, 0, 0)
    assert found["test_accuracy"] > 0.8
    assert (run_dir / "model" / "model.safetensors").exists()


def test_the_script_has_20_lines() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 22


def test_the_script_runs_alone(tmp_path: Path) -> None:
    (typed,) = documented("python examples/train.py")
    assert ROOT / typed.split()[-1] == SCRIPT
    printed = start(tmp_path, sys.executable)

    check_run(tmp_path / "run")
    assert layouts(tmp_path / "run") == [(1, 1)]
    assert re.fullmatch(r"60 steps, 3 layers frozen, accuracy 0\.\d+\n", printed)


@pytest.mark.parametrize("pipelines", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_under_torchrun_the_leader_chooses_layouts_within_a_fixed_world(pipelines: int, tmp_path: Path) -> None:
    printed = start(tmp_path, *TORCHRUN, f"--nproc-per-node={2 * pipelines}")

    check_run(tmp_path / "run")
    assert layouts(tmp_path / "run") == [(2, pipelines), (1, 2 * pipelines)]
    assert len(set(re.findall(r"60 steps.*", printed))) == 1


async def test_as_a_pods_command_the_script_is_a_worker_of_the_operator(tmp_path: Path) -> None:
    status = await operate(script_job().set("freeze.alpha", 0.6), tmp_path, "python")

    assert status.is_true(ConditionType.COMPLETE), logs(tmp_path)
    check_run(tmp_path)
    assert layouts(tmp_path) == [(2, 1), (1, 2)]
    assert summary(tmp_path)["steps_redone"] == 0
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["kind"] == "Overruled"]  # once, not in each generation
    assert (told["field"], told["script"], told["manifest"]) == ("spec.freeze.alpha", 0.5, 0.6)
    assert any(
        "the script says spec.freeze.alpha: 0.5; the manifest says 0.6, and wins" in log for log in logs(tmp_path)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("on_pack", "pipelines"), [("Widen", 2), ("Release", 1)])
async def test_agents_with_our_rendezvous_start_again_from_the_checkpoint_at_the_size_that_the_operator_says(
    on_pack: str, pipelines: int, tmp_path: Path
) -> None:
    agent = (*TORCHRUN, "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=pipetransformer")
    status = await operate(script_job().checkpoint().on_pack(on_pack), tmp_path, *agent)

    assert status.is_true(ConditionType.COMPLETE), logs(tmp_path)
    check_run(tmp_path)
    assert layouts(tmp_path) == [(2, 1), (1, pipelines)]


class DueOnceItRuns(MemoryStore):
    """Its job's deadline has passed once its workers train, however long they took to start."""

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        await super().write_status(job, status)
        if status.is_true(ConditionType.RUNNING):
            spec = self.last.spec
            policy = spec.run_policy.model_copy(update={"active_deadline_seconds": 1})
            self.last = self.last.model_copy(update={"spec": spec.model_copy(update={"run_policy": policy})})


@pytest.mark.slow
async def test_agents_and_their_processes_leave_when_the_job_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipetransformer_operator.local.run.MemoryStore", DueOnceItRuns)
    agent = (*TORCHRUN, "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=pipetransformer")
    policy = {"activeDeadlineSeconds": 400, "cleanPodPolicy": "None"}
    job = script_job().checkpoint().set("training.epochs", 10000).set("freeze", {"policy": "None"})

    status = await operate(job.set("runPolicy", policy), tmp_path, *agent)

    failed = status.condition(ConditionType.FAILED)
    assert failed is not None and failed.reason == "DeadlineExceeded", logs(tmp_path)
    assert status.checkpoint is not None and status.checkpoint.step > 0
    ended = [": Stopped" in log for log in logs(tmp_path)]
    assert ended and all(ended), logs(tmp_path)
