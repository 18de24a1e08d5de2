"""The whole local run with scripted workers: controller, channel and processes are real, training is not."""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.manifest import InvalidManifest, read_job, read_manifest
from pipetransformer_contract.api.status import ConditionType, Reason
from pipetransformer_operator.local.processes import ProcessPool
from pipetransformer_operator.local.run import run_job
from pipetransformer_operator.plan import PlanEvent
from tests.testkit import ROOT
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.namespace import until

pytestmark = pytest.mark.timeout(60)
SCRIPTED = ("python", str(ROOT / "tests/testkit/operator/scripted_trainer.py"))


def packing_job() -> JobBuilder:
    """Four stages that the freezes at steps 2 and 4 let shrink to two and to one."""
    points = [{"step": 2, "boundary": 8}, {"step": 4, "boundary": 11}]
    return (
        make_job()
        .command(*SCRIPTED)
        .stages(4)
        .workers(4)
        .drop("training.epochs")
        .set("training.steps", 6)
        .set("freeze", {"policy": "Explicit", "boundaries": points})
    )


def write(job: JobBuilder, folder: Path) -> Path:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job.manifest()))
    return file


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "advance-to").write_text("6")
    return folder


async def test_freezes_widen_the_job_through_three_layouts_and_it_completes(tmp_path: Path, run_dir: Path) -> None:
    events: list[PlanEvent] = []
    job = read_job(write(packing_job(), tmp_path), run_dir)
    status = await run_job(job, run_dir, on_event=events.append)
    assert status.is_true(ConditionType.COMPLETE), [event.message for event in events]
    assert status.generation is not None
    assert (status.generation.stages, status.generation.pipelines, status.generation.layout_generation) == (1, 4, 3)
    assert status.failures == 0 and status.next_worker_id == 4


async def test_a_releasing_job_gives_its_workers_back_while_it_trains(tmp_path: Path, run_dir: Path) -> None:
    (run_dir / "advance-to").write_text("5")

    def changed(job: PipeTrainingJob) -> None:
        if job.status.gpus.released == 3:
            (run_dir / "advance-to").write_text("6")

    job = read_job(write(packing_job().release(), tmp_path), run_dir)
    status = await run_job(job, run_dir, on_status=changed)
    assert status.is_true(ConditionType.COMPLETE)
    assert status.generation is not None and status.generation.stages * status.generation.pipelines == 1


async def test_blocks_that_train_again_deepen_the_pipelines_of_the_same_workers(tmp_path: Path, run_dir: Path) -> None:
    points = [{"step": 2, "boundary": 8}, {"step": 4, "boundary": 0}]
    events: list[PlanEvent] = []
    job = packing_job().set("freeze.boundaries", points)
    status = await run_job(read_job(write(job, tmp_path), run_dir), run_dir, on_event=events.append)
    assert status.is_true(ConditionType.COMPLETE), [event.message for event in events]
    assert status.generation is not None
    assert (status.generation.stages, status.generation.pipelines, status.generation.layout_generation) == (4, 1, 3)
    assert status.next_worker_id == 4
    assert Reason.LAYERS_UNFROZEN in {event.reason for event in events}


async def test_a_worker_that_refuses_its_spec_fails_the_job_in_its_words(tmp_path: Path, run_dir: Path) -> None:
    """The worker says what its container's `env` tells it to say."""
    env = [
        {"name": "SCRIPTED_REFUSAL", "value": "spec.data.path: no such folder"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    ]
    container = {"name": "trainer", "command": list(SCRIPTED), "env": env}
    job = read_job(write(packing_job().set("podTemplate.spec.containers", [container]), tmp_path), run_dir)
    status = await run_job(job, run_dir)
    failed = status.condition(ConditionType.FAILED)
    assert failed is not None and "spec.data.path: no such folder" in failed.message


async def test_a_program_that_ends_early_shows_the_end_of_its_log(tmp_path: Path, run_dir: Path) -> None:
    logs = run_dir / "logs"
    logs.mkdir()
    (logs / "digits-w0.log").write_text("of a run before\n")
    for command, message in (
        (["no-such-file.py"], "exited with code 2: python: can't open file"),
        (["-c", "import no_such_module"], "(exit code 1: ModuleNotFoundError: No module named 'no_such_module')"),
        (["-c", "raise SystemExit(2)"], "exited with code 2"),
    ):
        job = make_job().command("python", *command).stages(1).workers(1).set("runPolicy.backoffLimit", 0)
        status = await run_job(read_job(write(job, tmp_path), run_dir), run_dir)
        failed = status.condition(ConditionType.FAILED)
        assert failed is not None and message in failed.message
        assert "of a run before" not in failed.message
        assert ("no_such_module" in failed.message) == ("no_such_module" in command[-1])


async def test_a_run_leaves_nothing_of_its_workers_and_removes_what_a_killed_one_left(
    tmp_path: Path, run_dir: Path
) -> None:
    left = run_dir / "workers" / "digits-w0"
    left.mkdir(parents=True)
    (left / "termination-log").write_text("of a killed run")
    command = ["python", "-c", "import os; print(open(os.environ['PIPETRANSFORMER_CHANNEL_TOKEN_FILE']).read()); 1 / 0"]
    job = make_job().command(*command).stages(1).workers(1).set("runPolicy.backoffLimit", 0)

    status = await run_job(read_job(write(job, tmp_path), run_dir), run_dir)

    failed = status.condition(ConditionType.FAILED)
    assert failed is not None and "ZeroDivisionError" in failed.message
    assert not left.parent.exists()


STUBBORN = """
import os, signal, sys, time

def note(words):
    with open(sys.argv[2], "a") as file:
        file.write(words + "\\n")

signal.signal(signal.SIGTERM, lambda *_: note("told to end"))
os.fstat(int(sys.argv[1]))  # raises if it has no such file
note(f"{os.getpid()} {os.getsid(0)}")
time.sleep(60)
"""


async def test_a_second_interrupt_ends_workers_that_do_not_end_themselves(tmp_path: Path) -> None:
    """Until then they hold the lock of the run. Each is a session of its own, because Ctrl-C is for the run alone."""
    lock, note = os.open(tmp_path / "run.lock", os.O_RDWR | os.O_CREAT), tmp_path / "note"
    job = make_job().command("python", "-c", STUBBORN, str(lock), str(note)).stages(1).workers(1)
    run = run_job(read_job(write(job, tmp_path), tmp_path / "run"), tmp_path / "run", inherited=[lock])
    running = asyncio.create_task(run)

    async def noted() -> list[str]:
        return note.read_text().splitlines() if note.exists() else []

    async def told() -> bool:
        return len(await noted()) == 2

    pid, session = (await until("the worker runs", noted))[0].split()
    assert session == pid
    running.cancel()
    await until("the worker is told to end", told)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    os.close(lock)
    process = Path("/proc") / pid

    async def gone() -> bool:
        return not process.exists()

    await until("the worker is gone", gone)


async def test_a_process_that_cannot_be_started_now_is_started_later(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = asyncio.create_subprocess_exec, ["BlockingIOError"] * 2

    async def refuses(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        if refused:
            refused.pop()
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuses)
    conditions: list[str] = []

    def changed(job: PipeTrainingJob) -> None:
        running = job.status.condition(ConditionType.RUNNING)
        conditions.append(running.message if running else "")

    status = await run_job(read_job(write(packing_job(), tmp_path), run_dir), run_dir, on_status=changed)
    assert status.is_true(ConditionType.COMPLETE)
    assert "cannot start digits-w0: [Errno 11] Resource temporarily unavailable" in conditions


async def test_workers_are_listed_by_id(tmp_path: Path, run_dir: Path) -> None:
    pool = ProcessPool(run_dir, tmp_path, "https://127.0.0.1:1", ["true"], {}, [])
    job = read_job(write(packing_job(), tmp_path), run_dir)
    for number in (2, 0, 1):
        await pool.create(job, number, job.status)
    assert [worker.id for worker in pool.list(job)] == [0, 1, 2]
    await pool.all_ended()


async def test_a_run_ends_although_nobody_can_be_shown_that(tmp_path: Path, run_dir: Path) -> None:
    def changed(job: PipeTrainingJob) -> None:
        if job.status.finished:
            raise BrokenPipeError

    status = await run_job(read_job(write(packing_job(), tmp_path), run_dir), run_dir, on_status=changed)
    assert status.is_true(ConditionType.COMPLETE)


async def test_workers_of_a_failed_job_leave_by_themselves(tmp_path: Path) -> None:
    job = packing_job().set("runPolicy", {"activeDeadlineSeconds": 1, "cleanPodPolicy": "None"})
    status = await run_job(read_job(write(job, tmp_path), tmp_path / "run"), tmp_path / "run")
    failed = status.condition(ConditionType.FAILED)
    assert failed is not None and failed.reason == Reason.DEADLINE_EXCEEDED


@pytest.mark.parametrize("place", ["/mnt", "s3://bucket"])
def test_a_run_writes_to_its_folder_alone(place: str, tmp_path: Path) -> None:
    manifest = make_job().checkpoint(f"{place}/checkpoints").set("output", {"location": f"{place}/output"})
    job = read_job(write(manifest, tmp_path), tmp_path / "run")
    assert job.spec.checkpoint is not None and job.spec.output is not None
    assert job.spec.checkpoint.location == str(tmp_path / "run" / "checkpoints")
    assert job.spec.output.location == str(tmp_path / "run")


def test_a_command_that_cannot_start_is_refused(tmp_path: Path) -> None:
    for job, message in (
        (make_job().command("no-such-program"), r"containers\[0\]\.command: no-such-program is not found"),
        (make_job().set("podTemplate.spec.containers", [{"name": "trainer", "args": "train.py"}]),
         r"containers\[0\]\.args: must be a list of strings"),
        (make_job().set("podTemplate.spec.containers", [{"name": "trainer", "env": [{"name": "A", "value": 3}]}]),
         r"containers\[0\]\.env\[0\]: must have a name and, as its value, a string"),
    ):  # fmt: skip
        with pytest.raises(InvalidManifest, match=message):
            read_job(write(job, tmp_path), tmp_path)


def test_a_job_that_needs_the_trainer_is_refused_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pipetransformer", None)
    with pytest.raises(InvalidManifest, match=r"containers\[0\]: a local run needs the trainer here: pip install"):
        read_job(write(make_job(), tmp_path), tmp_path)
    read_job(write(make_job().command("python", "train.py"), tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (make_job().checkpoint().suspended(), "spec.suspend"),
        (make_job().set("managedBy", "kueue.x-k8s.io/multikueue"), "spec.managedBy"),
        (make_job("a/b"), "metadata.name"),
    ],
)
def test_a_job_that_would_never_start_here_is_refused(job: JobBuilder, field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidManifest, match=field):
        read_job(write(job, tmp_path), tmp_path)


def test_a_job_whose_name_the_cluster_makes_has_one_here(tmp_path: Path) -> None:
    manifest = make_job().manifest()
    del manifest["metadata"]["name"]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    with pytest.raises(InvalidManifest, match=r"metadata\.name"):
        read_manifest(file)
    manifest["metadata"]["generateName"] = "digits-"
    file.write_text(yaml.safe_dump(manifest))
    assert read_manifest(file) == manifest
    assert re.fullmatch("digits-[0-9a-f]{5}", read_job(file, tmp_path).metadata.name)
    file.write_text(yaml.safe_dump(manifest).replace("digits-", "d" * 46))
    with pytest.raises(InvalidManifest, match=r"metadata\.name"):
        read_manifest(file)


@pytest.mark.parametrize(
    "content",
    [
        "a: [",
        "a: !!timestamp 2024-01-01",
        "a: !!binary aGk=",
        "a: .inf",
        "a: .nan",
        "a: 1\na: 1",
        '{"a": {"b": 1, "b": 2}}',
    ],
)
def test_what_is_no_yaml_or_has_what_json_has_not_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    with pytest.raises(InvalidManifest, match="is not YAML"):
        read_manifest(file)


def test_a_key_overrides_one_that_is_merged(tmp_path: Path) -> None:
    file = write(make_job().set("data.options", "OPTIONS"), tmp_path)
    merged = "{a: &both {<<: {x: 1}, x: 2}, b: {<<: *both, x: 3}}"
    file.write_text(file.read_text().replace("OPTIONS", merged))
    assert read_manifest(file)["spec"]["data"]["options"] == {"a": {"x": 2}, "b": {"x": 3}}


def test_numbers_and_dates_are_read_as_kubectl_reads_them(tmp_path: Path) -> None:
    words = ["3e-4", "1E3", "-2", "0x1F", "0o17", "1_000", "12:30", "2024-01-01", "2024-01-01T10:00:00Z", "v1.2", "="]
    file = write(make_job().set("training.optimizer.learningRate", "LR").command("python", "WORDS"), tmp_path)
    file.write_text(file.read_text().replace("LR", "3e-4").replace("WORDS", f"[{', '.join(words)}]"))
    spec = read_manifest(file)["spec"]
    assert spec["training"]["optimizer"]["learningRate"] == 3e-4
    assert spec["podTemplate"]["spec"]["containers"][0]["command"][1] == [
        3e-4, 1000.0, -2, 31, 15, 1000, "12:30", "2024-01-01", "2024-01-01T10:00:00Z", "v1.2", "=",
    ]  # fmt: skip
