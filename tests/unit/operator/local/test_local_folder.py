"""The folder of a local run: whose it is, what resumes it, and that one process at a time trains in it."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipetransformer_client.run_folder import JOB_FILE, LOCK_FILE, RunFolder, RunFolderError
from pipetransformer_contract.api.manifest import (
    Document,
    InvalidManifest,
    local_job,
    local_manifest,
    worker_environment,
)
from pipetransformer_operator.local import child
from tests.testkit.operator.builders import JobBuilder, make_job


def claim(folder: Path, job: JobBuilder, *, trains: bool = True) -> str:
    """Begins or resumes the job in the folder; the name that it has there."""
    with RunFolder.open(folder) as opened:
        manifest = opened.claim(local_manifest(Document("job.yaml", job.manifest())))
        if trains:
            (folder / "steps.jsonl").touch()
        return str(manifest["metadata"]["name"])


def test_the_same_job_resumes(tmp_path: Path) -> None:
    assert claim(tmp_path / "run", make_job()) == "digits"
    assert claim(tmp_path / "run", make_job()) == "digits"


@pytest.mark.parametrize(
    "job",
    [
        make_job().set("training.seed", 0),  # the default
        make_job().set("elasticPolicy.maxWorkers", 2),
        make_job().set("runPolicy", {"backoffLimit": 9}),
        make_job().command("python", "mended.py"),
        make_job().checkpoint().set("checkpoint.everySteps", 5),
        make_job().set("output", {"location": "/elsewhere"}),
    ],
    ids=["default", "elasticPolicy", "runPolicy", "podTemplate", "checkpoint", "output"],
)
def test_what_a_job_may_change_while_it_does_not_run_resumes_it(job: JobBuilder, tmp_path: Path) -> None:
    claim(tmp_path, make_job())
    claim(tmp_path, job)


def test_the_folder_of_another_job_is_refused_with_what_to_do(tmp_path: Path) -> None:
    claim(tmp_path, make_job("gpt2"))
    with pytest.raises(RunFolderError) as refused:
        claim(tmp_path, make_job("digits"))
    assert str(refused.value) == (
        f"{tmp_path} holds a run of another job, gpt2. Name another folder for digits, or remove {tmp_path}"
    )


def test_other_settings_are_refused_with_their_fields_and_what_to_do(tmp_path: Path) -> None:
    claim(tmp_path, make_job())
    with pytest.raises(RunFolderError) as refused:
        claim(tmp_path, make_job().set("training.epochs", 9).set("freeze.alpha", 0.5))
    words = str(refused.value)
    assert "spec.freeze.alpha was 0.3333333333333333 and is 0.5" in words
    assert "spec.training.epochs was 4 and is 9" in words
    assert "Put them back to resume it. To start over, name another folder or remove" in words
    claim(tmp_path, make_job())


def test_a_folder_in_which_nothing_was_trained_takes_any_job(tmp_path: Path) -> None:
    claim(tmp_path, make_job("gpt2"), trains=False)
    assert claim(tmp_path, make_job("digits")) == "digits"


def test_the_record_of_a_script_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").touch()
    with pytest.raises(RunFolderError, match="a run that this command did not begin"):
        claim(tmp_path, make_job())


def test_a_name_that_was_made_here_is_kept(tmp_path: Path) -> None:
    job = make_job("")
    job._manifest["metadata"] = {"generateName": "digits-"}
    name = claim(tmp_path, job)
    assert name.startswith("digits-") and claim(tmp_path, job) == name


def test_a_finished_run_is_known_as_such(tmp_path: Path) -> None:
    claim(tmp_path, make_job())
    with RunFolder.open(tmp_path) as folder:
        assert not folder.finished
        folder.claim(local_manifest(Document("job.yaml", make_job().manifest())))
        folder.finish()
    claim(tmp_path, make_job())
    with RunFolder.open(tmp_path) as folder:
        assert folder.finished


def test_a_finished_run_stays_that_of_its_job(tmp_path: Path) -> None:
    """Also where its program keeps no record."""
    with RunFolder.open(tmp_path) as folder:
        folder.claim(local_manifest(Document("job.yaml", make_job("gpt2").manifest())))
        folder.finish()
    with pytest.raises(RunFolderError, match="a run of another job, gpt2"):
        claim(tmp_path, make_job("digits"))


def test_a_folder_whose_note_of_its_job_is_damaged_is_refused(tmp_path: Path) -> None:
    (tmp_path / JOB_FILE).write_text("")
    with pytest.raises(RunFolderError, match=r"job\.json is damaged\. Name another folder, or remove"):
        claim(tmp_path, make_job())


def test_a_file_system_without_locks_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert claim(tmp_path, make_job()) == "digits"


def test_the_newest_checkpoint_is_one_that_is_still_there(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path) as folder:
        (tmp_path / "events.jsonl").write_text('{"kind": "CheckpointDurable", "step": 20}\n')
        assert folder.checkpoint_step() is None
        contents = ["", "[]", *(json.dumps({"layoutGeneration": g, "step": s}) for g, s in [(2, 10), (1, 15), (2, 5)])]
        for number, content in enumerate(contents):
            marker = tmp_path / "checkpoints" / f"step-{number}" / "DONE.json"
            marker.parent.mkdir(parents=True)
            marker.write_text(content)
        (tmp_path / "checkpoints" / "step-99").mkdir()
        assert folder.checkpoint_step() == 10


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_trains(tmp_path: Path) -> None:
    words = rf"a run trains in .* already \(process {os.getpid()}\)"
    with RunFolder.open(tmp_path), pytest.raises(RunFolderError, match=words):
        claim(tmp_path, make_job())
    claim(tmp_path, make_job())


def test_the_lock_lasts_as_long_as_workers_do_whose_run_was_killed(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path) as folder:
        waits = "import sys; sys.stdin.read()"
        worker = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, pass_fds=[folder.lock])
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / LOCK_FILE).write_bytes(dead.stdout)
    refused = pytest.raises(RunFolderError, match="workers of an earlier run still train")
    with refused, RunFolder.open(tmp_path, patience_seconds=0.2):
        pytest.fail("two runs in one folder")
    worker.communicate()
    claim(tmp_path, make_job())


def test_a_local_run_needs_neither_a_pod_template_nor_accelerators(tmp_path: Path) -> None:
    manifest = make_job().drop("podTemplate").drop("acceleratorResource").manifest()
    job = local_job(local_manifest(Document("job.yaml", manifest)), tmp_path)
    assert job.spec.accelerator_resource == "" and job.spec.pod_template.trainer().name == "trainer"
    template = make_job().command("python", "train.py").drop("acceleratorResource").manifest()
    local_job(local_manifest(Document("job.yaml", template)), tmp_path)
    with pytest.raises(InvalidManifest, match=r"spec\.model"):
        local_manifest(Document("job.yaml", make_job().drop("model").drop("podTemplate").manifest()))


def test_a_local_run_keeps_checkpoints_whatever_its_manifest_says(tmp_path: Path) -> None:
    job = local_job(local_manifest(Document("job.yaml", make_job().manifest())), tmp_path)
    assert job.spec.checkpoint is not None and job.spec.checkpoint.location == str(tmp_path / "checkpoints")


def test_a_local_run_has_no_time_to_live_because_its_late_workers_would_never_hear_of_its_end(tmp_path: Path) -> None:
    manifest = make_job().set("runPolicy", {"ttlSecondsAfterFinished": 0, "backoffLimit": 7}).manifest()
    job = local_job(local_manifest(Document("job.yaml", manifest)), tmp_path)
    policy = job.spec.run_policy
    assert (policy.ttl_seconds_after_finished, policy.backoff_limit) == (None, 7)


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """However that ends: the kernel tells the worker."""
    program = "import sys; print('runs', flush=True); sys.stdin.read()"
    words = [sys.executable, "-IS", child.__file__, "PARENT", sys.executable, "-c", program]
    starts = f"import os, subprocess; words = {words!r}; words[3] = str(os.getpid()); subprocess.run(words)"
    parent = subprocess.Popen([sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdin is not None
    assert parent.stdout.readline() == "runs\n"
    parent.kill()
    assert parent.stdout.read() == "", "the worker holds the pipe as long as it lives"
    parent.wait()
    orphan = subprocess.run([sys.executable, "-IS", child.__file__, "1", "true"], check=False)
    assert orphan.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (make_job().checkpoint().suspended(), "spec.suspend: must be false, because a suspended job never starts"),
        (
            make_job().set("managedBy", "someone/else"),
            "spec.managedBy: someone/else does not start jobs in a local run",
        ),
    ],
)
def test_a_job_that_someone_else_would_have_to_start_is_refused(job: JobBuilder, words: str, tmp_path: Path) -> None:
    """Otherwise the command would wait for ever."""
    with pytest.raises(InvalidManifest) as refused:
        local_job(local_manifest(Document("job.yaml", job.manifest())), tmp_path)
    assert words in str(refused.value)


@pytest.mark.parametrize(("count", "more"), [(5, ""), (7, ", and 2 more")])
def test_of_many_other_settings_five_are_named(count: int, more: str, tmp_path: Path) -> None:
    claim(tmp_path, make_job())
    changed = make_job()
    for field in ("seed", "globalBatchSize", "maxSkippedSteps", "maxGradientNorm", "optimizer.weightDecay")[:count]:
        changed.set(f"training.{field}", 1)
    for field in ("beta1", "beta2")[: count - 5]:
        changed.set(f"training.optimizer.{field}", 0.5)
    with pytest.raises(RunFolderError) as refused:
        claim(tmp_path, changed)
    named = str(refused.value)
    assert named.count(" was ") == 5 and f"{more}. Put them back to resume it" in named
    assert more or "more" not in named


def test_a_variable_from_a_secret_stays_that_of_the_environment(tmp_path: Path) -> None:
    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    container = {"name": "trainer", "image": "trainer", "env": [{"name": "A", "value": "1"}, {"name": "B"}, secret]}
    manifest = make_job().set("podTemplate.spec.containers", [container]).manifest()
    job = local_job(local_manifest(Document("job.yaml", manifest)), tmp_path)
    assert worker_environment(job) == {"A": "1", "B": ""}
