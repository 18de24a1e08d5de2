"""The command line: refusals, exit codes and completion."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.table import Table

from pipetransformer_client import Client
from pipetransformer_client.cli import completion, show
from pipetransformer_client.cli.options import console
from pipetransformer_client.cli.summary import print_summary
from pipetransformer_client.cli.view import PlainView
from pipetransformer_client.errors import Unavailable
from pipetransformer_client.job import Event, Job
from pipetransformer_client.kube import Kube
from pipetransformer_contract.api import JobStatus
from pipetransformer_contract.api.requests import Object
from pipetransformer_contract.api.validate import validate_manifest
from tests.testkit import ROOT
from tests.testkit.client.command_line import command
from tests.testkit.client.fake_kube import JOBS, FakeKube, finished, published, stored
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.manifests import REFUSED


@pytest.mark.parametrize("words", [("run", "--run-dir", "run"), ("submit",)], ids=["run", "submit"])
def test_a_wrong_file_is_refused_with_the_fields_path_and_exit_code_2(
    words: tuple[str, ...],
    tmp_path: Path,
    fake: FakeKube,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(yaml.safe_dump(make_job().stages(4).workers(3).manifest()))
    assert command(monkeypatch, *words, "job.yaml") == 2
    assert "spec.elasticPolicy.workers" in capsys.readouterr().err
    assert fake.requests == []


@pytest.mark.parametrize("job", [job for job, path in REFUSED if path.startswith("spec.pipeline.")])
def test_a_local_run_refuses_a_pipeline_in_the_words_of_the_api_server(
    job: JobBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(yaml.safe_dump(job.manifest()))
    assert command(monkeypatch, "run", "--run-dir", "run", "job.yaml") == 2
    said = " ".join(capsys.readouterr().err.split())
    for error in validate_manifest(job.manifest()):
        assert error.path in said and error.message in said


def test_a_local_run_that_could_never_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cluster's job waits until its user raises the limit. Nobody can edit a local run."""
    monkeypatch.chdir(tmp_path)
    for least in (1, 2):
        job = make_job().stages(4).workers(8, most=4 * least - 1).set("elasticPolicy.minPipelines", least)
        Path("job.yaml").write_text(yaml.safe_dump(job.manifest()))
        assert command(monkeypatch, "run", "--run-dir", "run", "job.yaml") == 2
        words = f"spec.elasticPolicy.maxWorkers: no layout of 4 stages fits {4 * least - 1} workers, with minPipelines"
        assert f"{words} {least} and minWorkers 1" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize("words", [("run", "--run-dir", "run"), ("submit",)], ids=["run", "submit"])
def test_a_file_that_is_not_there_is_refused(
    words: tuple[str, ...], fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, *words, "/nowhere.yaml") == 2
    assert "/nowhere.yaml" in capsys.readouterr().err


def test_a_job_of_another_namespace_than_was_asked_for_is_refused(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(make_job().manifest()))
    assert command(monkeypatch, "submit", str(tmp_path / "job.yaml"), "-n", "team") == 2
    assert "the manifest's namespace is default" in capsys.readouterr().err.replace("\n", " ")
    assert fake.requests == []


def test_a_folder_that_cannot_be_written_to_is_no_failure_of_the_job(
    tmp_path: Path, fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # the message is in a box, which breaks long paths
    (tmp_path / "model").touch()
    (tmp_path / "results" / "digits" / "model").mkdir(parents=True)
    fake.objects[f"{JOBS}/digits"] = stored(make_job().set("output.location", f"file://{tmp_path}/results"))
    assert command(monkeypatch, "fetch", "digits", str(tmp_path / "model")) == 2
    assert "model" in capsys.readouterr().err


def test_deleting_a_job_without_a_name_deletes_nothing(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "delete", "") == 2
    assert "'' is not a valid name" in capsys.readouterr().err
    assert fake.requests == []


def test_a_job_that_is_not_there_ends_with_exit_code_3(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "describe", "nobody") == 3
    assert "nobody" in capsys.readouterr().err


def test_a_list_is_a_table_or_what_a_program_reads(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.objects[JOBS] = {
        "items": [stored(make_job("one"), state="Running", generation=published("one-w0"), frozen="6/12")]
    }
    assert command(monkeypatch, "list") == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["NAME", "STATE"]
    assert row.split()[:6] == ["one", "Running", "1", "1", "0", "6/12"]
    for option, load in (("json", json.loads), ("yaml", yaml.safe_load)):
        assert command(monkeypatch, "list", "-o", option) == 0
        assert load(capsys.readouterr().out)["items"][0]["metadata"]["name"] == "one"


def test_a_job_that_a_newer_operator_wrote_hides_no_other(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = stored(make_job("newer"))
    newer["status"] = {"state": "Dreaming"}
    fake.objects[JOBS] = {"items": [newer, stored(make_job("one"))]}
    fake.objects[f"{JOBS}/newer"] = newer

    assert command(monkeypatch, "list") == 0
    said = capsys.readouterr()
    assert [row.split()[0] for row in said.out.splitlines()[1:]] == ["newer", "one"]
    assert "the status of default/newer is newer than this client: upgrade the client (state: Input" in said.err
    assert command(monkeypatch, "describe", "newer", "-o", "json") == 0, "it needs no status"
    capsys.readouterr()
    assert command(monkeypatch, "describe", "newer") == 3


def report_of(step: int, **fields: Any) -> Object:
    """A report as the status holds it."""
    needed = {"jobUid": "job-uid", "layoutGeneration": 1, "boundary": 6, "numLayers": 12, "bytesBudget": 0}
    return {**needed, "time": "2026-01-01T00:00:00Z", "step": step, "totalSteps": 400, **fields}


def test_the_jobs_of_all_namespaces_are_sorted_and_show_how_far_they_are(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = report_of(400, secondsLeft=12.0, outcome="Succeeded")
    jobs = [stored(make_job("b"), lastReport=ended), stored(make_job("a")), stored(make_job("c"))]
    jobs[0]["metadata"]["namespace"] = jobs[1]["metadata"]["namespace"] = "team"
    jobs[2]["status"] = {"lastReport": report_of(100, secondsLeft=200.0)}
    fake.objects[JOBS.replace("/namespaces/default", "")] = {"items": jobs}
    assert command(monkeypatch, "list", "-A") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [["NAMESPACE", "NAME"], ["default", "c"], ["team", "a"], ["team", "b"]]
    steps = rows[0].index("STEP")
    assert [row[steps : steps + 2] for row in rows[1:]] == [["100/400", "3m20s"], ["-", "-"], ["400/400", "-"]]


def test_a_description_names_checkpoint_and_results(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job().checkpoint().set("output.location", "/storage/")
    checkpoint = {"step": 120, "boundary": 6, "minStages": 1}
    fake.objects[f"{JOBS}/digits"] = stored(job, checkpoint=checkpoint, lastReport=report_of(130))
    fake.objects["/api/v1/namespaces/default/events"] = {"items": []}
    assert command(monkeypatch, "describe", "digits") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"checkpoint at step 120, 6 frozen", "results: /storage/digits"} <= set(lines)
    assert "step 130/400 (32%)  frozen 6/12" in lines


def test_a_deleted_job_takes_its_workers_with_it(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "delete", "digits") == 0
    assert fake.requests == [("DELETE", f"{JOBS}/digits", {"propagationPolicy": "Background"})]
    assert capsys.readouterr().out == "default/digits deleted\n"


def test_the_saved_gpu_time_is_that_of_now(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status has it only up to the last change of a layout."""
    hour_ago = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    saved: Object = {"gpuSecondsSaved": 3600.0, "gpuSecondsTime": hour_ago, "gpus": {"held": 2, "saved": 2}}
    fake.objects[f"{JOBS}/one"] = stored(make_job("one"), **saved)
    fake.objects[JOBS] = {"items": [fake.objects[f"{JOBS}/one"]]}
    fake.objects["/api/v1/namespaces/default/events"] = {"items": []}
    assert command(monkeypatch, "list") == 0
    assert " 3.00 GPUh " in capsys.readouterr().out
    assert command(monkeypatch, "describe", "one") == 0
    assert re.search(r"workers held 2, released 0, 108\d\d GPU-seconds saved", capsys.readouterr().out)


def test_a_narrow_terminal_cuts_neither_names_nor_messages(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    name, words = "n" * 50, ["[/data]", "labels[kueue.x-k8s.io/queue-name]:", ":x:"]
    failed = {**finished("Failed"), "message": " ".join(words)}
    fake.objects[JOBS] = {"items": [stored(make_job(name), conditions=[failed])]}
    fake.objects[f"{JOBS}/{name}"] = fake.objects[JOBS]["items"][0]
    fake.objects["/api/v1/namespaces/default/events"] = {"items": []}
    assert command(monkeypatch, "list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["NAME", name]
    assert command(monkeypatch, "describe", name) == 0
    shown = capsys.readouterr().out.split()
    assert [word for word in words if word not in shown] == []


def test_a_file_or_a_pipe_gets_lines_and_tables_as_wide_as_they_are(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    name, layers = "n" * 50, " ".join(["1"] * 200)
    fake.objects[f"{JOBS}/{name}"] = stored(make_job(name).checkpoint())
    assert command(monkeypatch, "suspend", name) == 0
    assert capsys.readouterr().out == f"default/{name} suspended\n"
    table = Table("layers by stage")
    table.columns[0].no_wrap = True
    table.add_row(layers)
    console().print(table)
    assert layers in capsys.readouterr().out


def test_an_address_in_an_error_is_printed_as_it_is(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(*_: object, **__: object) -> Object:
        raise Unavailable("dial tcp [fd00:100:1234::a:1]:443: connection refused")

    monkeypatch.setattr(fake, "get", unavailable)
    assert command(monkeypatch, "list") == 3
    assert capsys.readouterr().err == "error: dial tcp [fd00:100:1234::a:1]:443: connection refused\n"


def test_watching_a_job_that_fails_ends_with_exit_code_1_and_its_reason(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), conditions=[finished("Failed")])
    events = [
        {
            "metadata": {"uid": reason, "resourceVersion": version},
            "reason": reason,
            "message": "digits-w0",
            "type": "Warning",
            "lastTimestamp": "2026-01-01T00:00:00Z",
        }
        for reason, version in (("BackoffLimitExceeded", "10"), ("WorkerLost", "9"))
    ]
    fake.objects["/api/v1/namespaces/default/events"] = {"items": events}
    assert command(monkeypatch, "watch", "digits") == 1
    out, err = capsys.readouterr()
    assert out.index("WorkerLost: digits-w0") < out.index("BackoffLimitExceeded: digits-w0"), "not as they happened"
    assert "Because: so it is" in err


def test_a_watch_tells_each_event_once(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job())
    later = [stored(make_job(), 2), stored(make_job(), 3, conditions=[finished()])]
    fake.texts[JOBS] = [[json.dumps({"type": "MODIFIED", "object": job}) for job in later]]
    happened = {"metadata": {"uid": "u", "resourceVersion": "1"}, "reason": "WorkerLost", "message": "digits-w0"}
    events = [{**happened, "lastTimestamp": "2026-01-01T00:00:00Z"}]
    fake.objects["/api/v1/namespaces/default/events"] = {"items": events}
    assert command(monkeypatch, "watch", "digits") == 0
    assert capsys.readouterr().out.count("WorkerLost: digits-w0") == 1


def test_a_watch_goes_on_where_events_cannot_be_read(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(client: Client, job: Job) -> list[Event]:
        raise Unavailable("etcdserver: leader changed")

    monkeypatch.setattr(Client, "events", unavailable)
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), conditions=[finished()])
    assert command(monkeypatch, "watch", "digits") == 0
    assert "digits is complete" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "code"), [("Complete", 0), ("Failed", 1)])
def test_a_program_that_waits_for_the_job_it_submits_reads_it_as_it_ended(
    kind: str,
    code: int,
    tmp_path: Path,
    fake: FakeKube,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = stored(make_job(), 2, conditions=[finished(kind)])
    fake.texts[JOBS] = [[json.dumps({"type": "MODIFIED", "object": ended})]]

    def request(method: str, path: str, body: Object, **_: object) -> Object:
        fake.objects[f"{path}/digits"] = stored(make_job())
        return fake.objects[f"{path}/digits"]

    monkeypatch.setattr(fake, "request", request)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(make_job().manifest()))
    assert command(monkeypatch, "submit", str(tmp_path / "job.yaml"), "-w", "-o", "json") == code
    assert json.loads(capsys.readouterr().out) == ended


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_asked_for_shortly_or_at_length(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, option) == 0
    assert "submit" in capsys.readouterr().out
    assert command(monkeypatch, "watch", option) == 0
    assert "--timeout" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"pipetransformer {version('pipetransformer-client')}\n"


@pytest.mark.parametrize(
    ("words", "changed", "told"),
    [
        (("suspend", "digits"), {"suspend": True}, "default/digits suspended"),
        (("resume", "digits"), {"suspend": False}, "default/digits resumed"),
        (("scale", "digits", "8"), {"elasticPolicy": {"maxWorkers": 8}}, "default/digits scaled to at most 8 workers"),
    ],
    ids=["suspend", "resume", "scale"],
)
def test_a_job_that_is_there_is_changed(
    words: tuple[str, ...],
    changed: Object,
    told: str,
    fake: FakeKube,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job().checkpoint())
    assert command(monkeypatch, *words) == 0
    assert fake.requests == [("PATCH", f"{JOBS}/digits", {"spec": changed})]
    assert capsys.readouterr().out == f"{told}\n"


def asked(token: str, **answer: Any) -> Object:
    """The job as its status names a request."""
    request = {"token": token, "time": "2026-01-01T00:00:00Z", **answer}
    return stored(make_job().checkpoint(), version=2, checkpointRequest=request)


def test_a_checkpoint_is_asked_for_under_a_token(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job().checkpoint())
    assert command(monkeypatch, "checkpoint", "now", "digits", "--token", "before-upgrade") == 0
    annotations = {"training.pipetransformer.io/checkpoint-now": "before-upgrade"}
    assert fake.requests == [("PATCH", f"{JOBS}/digits", {"metadata": {"annotations": annotations}})]
    assert capsys.readouterr().out == "default/digits was asked for the checkpoint before-upgrade\n"
    assert command(monkeypatch, "checkpoint", "now", "digits") == 0
    assert command(monkeypatch, "checkpoint", "now", "digits") == 0
    tokens = {next(iter(body["metadata"]["annotations"].values())) for _, _, body in fake.requests[1:] if body}
    assert len(tokens) == 2, "each has a new one"
    assert command(monkeypatch, "checkpoint", "now", "digits", "--token", "") == 2
    assert command(monkeypatch, "checkpoint", "now", "digits", "--token", "x" * 64) == 2
    assert command(monkeypatch, "checkpoint", "now", "digits", "--token", "x" * 63) == 0


def test_a_job_without_checkpoints_is_not_asked_for_one(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job())
    assert command(monkeypatch, "checkpoint", "now", "digits") == 3
    assert "default/digits has no spec.checkpoint" in capsys.readouterr().err
    assert fake.requests == []


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [
        ({"step": 7}, 0, "default/digits has a durable checkpoint of step 7"),
        ({"message": "the job ended"}, 3, "default/digits: the job ended"),
    ],
)
def test_a_command_waits_for_the_checkpoint(
    answer: Object,
    code: int,
    told: str,
    fake: FakeKube,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job().checkpoint())
    seen = [asked("another", step=3), asked("one"), asked("one", **answer)]
    monkeypatch.setattr(Client, "stream", lambda client, name, timeout: map(Job.of, seen))
    assert command(monkeypatch, "checkpoint", "now", "digits", "--token", "one", "--wait") == code
    out, err = capsys.readouterr()
    assert told in out + err


@pytest.mark.parametrize("seen", [[asked("one"), asked("two")], [asked("one")]])
def test_a_wait_for_a_checkpoint_ends_with_what_will_not_answer_it(
    seen: list[Object], fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job().checkpoint())
    monkeypatch.setattr(Client, "stream", lambda client, name, timeout: map(Job.of, seen))
    assert command(monkeypatch, "checkpoint", "now", "digits", "--token", "one", "--wait") == 3
    assert "default/digits" in capsys.readouterr().err


def test_a_job_that_has_ended_is_not_changed(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), state="Complete", conditions=[finished()])
    assert command(monkeypatch, "suspend", "digits") == 3
    assert "default/digits has ended (Complete) and cannot be changed" in capsys.readouterr().err
    assert fake.requests == []


RUN = ("run", "job.yaml", "--run-dir", "run")


def write_local_job(folder: Path, monkeypatch: pytest.MonkeyPatch, *, advance_to: int) -> None:
    """Changes to a folder with a job of six steps, whose scripted worker makes `steps` of them."""
    monkeypatch.chdir(folder)
    trainer = ("python", str(ROOT / "tests/testkit/operator/scripted_trainer.py"))
    job = make_job().command(*trainer).drop("training.epochs").set("training.steps", 6)
    (folder / "job.yaml").write_text(yaml.safe_dump(job.manifest()))
    (folder / "run").mkdir()
    (folder / "run" / "advance-to").write_text(str(advance_to))


def slow_to_end(seconds: int) -> str:
    """The command of a scripted worker that needs so long for its checkpoint."""
    trainer = ROOT / "tests/testkit/operator/scripted_trainer.py"
    saves = f"trap 'sleep {seconds}; touch run/saved; kill $!; exit' TERM"
    return json.dumps(["sh", "-c", f"echo $$ > run/pid; {saves}; python {trainer} & wait"])


def signal_while_it_trains(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Sends the signal to this process at each report."""
    shown = PlainView.show_status

    def changed(view: PlainView, name: str, status: JobStatus) -> None:
        shown(view, name, status)
        if status.last_report is not None:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(PlainView, "show_status", changed)


def test_a_finished_run_says_where_its_model_is_and_how_to_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_local_job(tmp_path, monkeypatch, advance_to=6)
    assert command(monkeypatch, *RUN) == 0
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / "steps.jsonl").touch()
    capsys.readouterr()
    assert command(monkeypatch, *RUN) == 0
    run = tmp_path / "run"
    words = f"digits has already finished in {run}, and its model is {run / 'model'}. To train it again, name another"
    assert words in capsys.readouterr().out
    assert command(monkeypatch, *RUN, "--set", "training.steps=9") == 2
    assert "spec.training.steps was 6 and is 9" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_workers_and_says_how_to_resume(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_local_job(tmp_path, monkeypatch, advance_to=3)
    signal_while_it_trains(monkeypatch, number)
    assert command(monkeypatch, *RUN) == 130
    out, told = capsys.readouterr()
    assert "Stopping: The workers write a checkpoint. Press Ctrl-C again to end them at once" in out
    assert "The same command starts over, because there is no checkpoint yet" in told


def test_a_run_whose_checkpoints_are_gone_says_that_it_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_local_job(tmp_path, monkeypatch, advance_to=3)
    with monkeypatch.context() as interrupted:
        signal_while_it_trains(interrupted, signal.SIGINT)
        assert command(interrupted, *RUN) == 130
    run = tmp_path / "run"
    (run / "steps.jsonl").touch()
    (run / "events.jsonl").write_text('{"kind": "CheckpointDurable", "step": 3}\n')
    (run / "advance-to").write_text("6")
    capsys.readouterr()
    assert command(monkeypatch, *RUN) == 0
    out = "".join(capsys.readouterr().out.split("\n"))
    assert f"StartingOver: because {run / 'checkpoints'} has no checkpoint" in out and "Resuming" not in out


def test_a_run_says_why_it_failed_even_if_its_timeline_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_local_job(tmp_path, monkeypatch, advance_to=0)
    monkeypatch.setattr("pipetransformer_client.cli.run.read_record", full)
    command_line = '["sh", "-c", "echo the storage is full >&2; exit 2"]'
    assert command(monkeypatch, *RUN, "--set", f"podTemplate.spec.containers[0].command={command_line}") == 1
    assert "the storage is full" in capsys.readouterr().err


def test_a_hangup_that_is_ignored_stays_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ignores SIGHUP, as `nohup` does."""
    write_local_job(tmp_path, monkeypatch, advance_to=6)
    signal_while_it_trains(monkeypatch, signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert command(monkeypatch, *RUN) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "TrainingSucceeded" in capsys.readouterr().out


def test_a_closed_terminal_ends_the_workers_and_leaves_them_time_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel and the shell send SIGHUP, and nothing can be written any more."""
    write_local_job(tmp_path, monkeypatch, advance_to=3)

    def closed(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def changed(view: PlainView, name: str, status: JobStatus) -> None:
        if status.last_report is not None:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
        closed()

    monkeypatch.setattr(PlainView, "show_status", changed)
    monkeypatch.setattr(PlainView, "show_event", closed)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        assert command(monkeypatch, *RUN, "--set", f"podTemplate.spec.containers[0].command={slow_to_end(1)}") == 130
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "run" / "saved").exists()


def test_a_second_signal_ends_the_workers_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_local_job(tmp_path, monkeypatch, advance_to=3)
    told = PlainView.show_event

    def again(view: PlainView, reason: str, message: str, *, warning: bool) -> None:
        told(view, reason, message, warning=warning)
        if reason == "Stopping":
            os.kill(os.getpid(), signal.SIGINT)

    signal_while_it_trains(monkeypatch, signal.SIGINT)
    monkeypatch.setattr(PlainView, "show_event", again)
    assert command(monkeypatch, *RUN, "--set", f"podTemplate.spec.containers[0].command={slow_to_end(30)}") == 130
    assert not (tmp_path / "run" / "saved").exists()
    assert not Path("/proc", (tmp_path / "run" / "pid").read_text().strip()).exists()


def test_a_run_that_cannot_be_shown_ends_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_local_job(tmp_path, monkeypatch, advance_to=6)
    monkeypatch.setattr(PlainView, "show_status", full)
    monkeypatch.setattr(PlainView, "show_event", full)
    assert command(monkeypatch, *RUN) == 0


def completions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str) -> list[str]:
    """Completions that kubectl gets."""
    for name in ("_PIPETRANSFORMER_COMPLETE", "COMP_WORDS", "COMP_CWORD"):
        monkeypatch.setenv(name, "")  # restores the environment after the test
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-pipetransformer", *words.split(" ")])
    completion.main()
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("wat", ["watch", ":4"]),
        ("list --names", ["--namespace", ":4"]),
        ("describe v", ["vit-digits", ":4"]),
        ("describe -n team ", ["of-team", ":4"]),
        ("describe --namespace=team ", ["of-team", ":4"]),
        ("run ", ["yaml", "yml", "json", ":8"]),
        ("submit -w ex", ["yaml", "yml", "json", ":8"]),
        ("plan job.yaml --costs ", ["yaml", "yml", "json", ":8"]),
        ("run job.yaml --run-dir ", [":16"]),
        ("fetch vit-digits ", [":16"]),
        ("run job.yaml --set training.ep", ["training.epochs=", ":6"]),
        ("timeline ru", ["runs/", ":6"]),
        ("timeline vit-digits ", [":16"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kubectl_completes_commands_options_jobs_fields_and_paths(
    words: str,
    expected: list[str],
    tmp_path: Path,
    fake: FakeKube,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    fake.objects[JOBS] = {"items": [stored(make_job("vit-digits")), stored(make_job("gpt2"))]}
    fake.objects[JOBS.replace("default", "team")] = {"items": [stored(make_job("of-team"))]}
    assert completions(monkeypatch, capsys, words) == expected


def test_jobs_are_completed_from_the_context_that_was_chosen(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.objects[JOBS] = {"items": [stored(make_job("there"))]}
    contexts: list[str | None] = []

    def connect(context: str | None = None) -> Kube:
        contexts.append(context)
        return fake.kube

    monkeypatch.setattr(Kube, "connect", connect)
    assert completions(monkeypatch, capsys, "watch --context other ") == ["there", ":4"]
    assert contexts == ["other"]


def test_without_a_cluster_the_error_says_so(tmp_path: Path) -> None:
    environment = os.environ | {"KUBECONFIG": str(tmp_path / "none"), "KUBERNETES_SERVICE_HOST": ""}
    words = [sys.executable, "-m", "pipetransformer_client", "list"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == (
        f"error: no cluster found: there is no kubeconfig {tmp_path / 'none'}. This is not a pod with a ServiceAccount"
        " either. Set KUBECONFIG to the path of a kubeconfig\n"
    )


@pytest.mark.parametrize("content", [b"a: [", b"- a", b"text", b"\xff\xfe"])
def test_a_kubeconfig_that_is_none_is_said(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_bytes(content)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(Unavailable, match=f"cannot read the kubeconfig {tmp_path / 'config'}: "):
        Kube.connect()


@pytest.mark.parametrize(
    ("age", "text"),
    [({"seconds": 5}, "5s"), ({"hours": 3, "minutes": 4, "seconds": 5}, "3h4m"), ({"days": 40}, "40d")],
)
def test_an_age_has_two_units_at_most(age: dict[str, int], text: str) -> None:
    assert show._age(datetime.now(UTC) - timedelta(**age)) == text


@pytest.mark.parametrize(
    ("lost", "unaudited", "first_step", "says"),
    [
        (0, 0, 0, "samples lost 0, repeated 0\n"),
        (0, 0, 40, "samples lost 0, repeated 0 since step 40\n"),
        (None, 900, 0, "samples lost unknown, repeated 0 (the ledgers of 900 samples are not in this record)\n"),
        (2, 900, 0, "samples lost 2, repeated 0 (the ledgers of 900 samples are not in this record)\n"),
    ],
)
def test_what_no_ledger_here_can_tell_is_said_to_be_unknown(
    lost: int | None, unaudited: int, first_step: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audited = {"samples_lost": lost, "samples_repeated": 0, "samples_unaudited": unaudited}
    summary = {"test_accuracy": 0.9, "wall_seconds": 1.0, "generations": [], "audited_from_step": first_step}
    (tmp_path / "summary.json").write_text(json.dumps(summary | audited))
    print_summary(Console(width=200), tmp_path)
    assert capsys.readouterr().out.endswith(f"test accuracy 0.900, 1.000 s, {says}")
