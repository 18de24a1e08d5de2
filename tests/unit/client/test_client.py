"""Streams, logs and results of the client, with a cluster in memory."""

import contextlib
import io
import itertools
import json
import re
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from pipetransformer_client import (
    Client,
    ClientError,
    InvalidManifest,
    InvalidName,
    NotFound,
    NothingToFetch,
    Refused,
    fetch,
    logs,
)
from pipetransformer_client import client as module
from pipetransformer_client.errors import Unavailable
from pipetransformer_client.fetch import fetch_from_url, reader_pod
from pipetransformer_client.job import Job
from pipetransformer_client.kube import Query
from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.requests import Object
from tests.testkit.client.fake_kube import JOBS, PODS, FakeKube, finished, published, stored
from tests.testkit.operator.builders import make_job

if TYPE_CHECKING:
    from tests.testkit.object_store import ObjectStore


@pytest.fixture
def fake() -> FakeKube:
    return FakeKube()


@pytest.fixture
def client(fake: FakeKube) -> Client:
    return Client(fake.kube)


def event(kind: str, job: Object) -> str:
    return json.dumps({"type": kind, "object": job})


def test_a_manifest_is_refused_before_it_is_sent(client: Client, fake: FakeKube) -> None:
    with pytest.raises(InvalidManifest, match=r"spec\.elasticPolicy\.workers"):
        client.submit(make_job().stages(4).workers(3).manifest())
    assert fake.requests == []


def test_a_key_with_nothing_behind_it_is_as_if_it_were_not_there(client: Client, fake: FakeKube) -> None:
    job = make_job().set("evaluation", None).set("checkpoint", None).set("podTemplate.metadata", {"labels": None})
    template = job.manifest()["spec"]["podTemplate"]["spec"]
    template["containers"][0] |= {"resources": None, "env": None}
    manifest = job.set("podTemplate.spec", template).manifest()
    manifest["metadata"] |= {"labels": None, "uid": "job-uid"}
    client.submit(manifest | {"status": None})
    ((_, _, sent),) = fake.requests
    assert PipeTrainingJob.from_manifest(sent).spec == make_job().job().spec.model_copy(
        update={"pod_template": PipeTrainingJob.from_manifest(sent).spec.pod_template}
    )


def test_a_job_goes_to_the_namespace_of_its_manifest_else_to_the_clients(fake: FakeKube) -> None:
    client = Client(fake.kube, "team-a")
    without = stored(make_job("one"))
    del without["metadata"]["namespace"]
    for manifest in (without, stored(make_job("two"))):
        del manifest["status"]
        client.submit(manifest)
    assert [path.split("/")[5] for _, path, _ in fake.requests] == ["team-a", "default"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a?b", "a,metadata.name!=b", "A"])
def test_an_invalid_name_is_refused_without_a_request(
    name: str, client: Client, fake: FakeKube, tmp_path: Path
) -> None:
    fake.objects[JOBS] = {"items": [stored(make_job())]}
    with pytest.raises(match=re.escape(repr(name))):
        client.delete(name)
    with pytest.raises(InvalidName):
        client.get(name)
    with pytest.raises(InvalidName):
        next(client.stream(name))
    with pytest.raises(InvalidName):
        client.fetch_record(name, tmp_path)
    if name:  # None means the kubeconfig's
        with pytest.raises(InvalidName):
            Client(fake.kube, name).delete("digits")
    assert fake.requests == []


def test_a_stream_shows_each_change_up_to_the_end(client: Client, fake: FakeKube) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), 1, state="Pending")
    later = [stored(make_job(), 2, state="Running"), stored(make_job(), 3, state="Complete", conditions=[finished()])]
    fake.texts[JOBS] = [[event("MODIFIED", job) for job in later]]
    assert [job.status.state.value for job in client.stream("digits")] == ["Pending", "Running", "Complete"]


def test_a_stream_whose_watch_ends_reads_what_it_missed(
    client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), 1, state="Pending")
    stream = client.stream("digits")
    next(stream)
    fake.texts[JOBS] = [[json.dumps({"type": "ERROR", "object": {"code": 410}})]]
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), 9, state="Failed", conditions=[finished("Failed")])
    (job,) = stream
    assert job.failure == "Because: so it is"


def test_a_stream_whose_watch_breaks_goes_on_after_what_it_showed(
    client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    running, ended = stored(make_job(), 2), stored(make_job(), 3, conditions=[finished()])
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), 1)
    watches = [[event("MODIFIED", running)], [event("MODIFIED", ended)]]
    begun: list[str | int] = []

    def lines(path: str, query: Query, *, silence: float) -> Iterator[str]:
        assert silence > int(query["timeoutSeconds"]), "a job that does not change is no broken stream"
        begun.append(query["resourceVersion"])
        yield from watches.pop(0)
        raise Unavailable("the connection broke")

    monkeypatch.setattr(fake, "lines", lines)
    versions = [job.manifest["metadata"]["resourceVersion"] for job in client.stream("digits")]
    assert versions == ["1", "2", "3"]
    assert begun == ["1000", "2"]


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_watches_that_end_at_once_are_few_and_begin_where_a_list_is(
    client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "time", Clock())
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), 1, state="Pending")
    fake.texts[JOBS] = [[json.dumps({"type": "ERROR", "object": {"code": 410}})]]
    stream = client.stream("digits", timeout=2.5 * module.RETRY_SECONDS)
    next(stream)
    with pytest.raises(TimeoutError):
        next(stream)  # nothing has changed
    assert {query["resourceVersion"] for query in fake.streams} == {"1000"}
    assert len(fake.streams) == 3


def test_a_stream_ends_with_an_error_when_the_job_is_deleted(client: Client, fake: FakeKube) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), 1)
    fake.texts[JOBS] = [[event("DELETED", stored(make_job(), 2))]]
    with pytest.raises(NotFound, match="was deleted"):
        client.wait("digits")


def test_a_stream_does_not_go_over_to_another_job_of_the_name(client: Client, fake: FakeKube) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), 1, state="Pending")
    fake.texts[JOBS] = [[]]
    stream = client.stream("digits")
    next(stream)
    fake.objects[f"{JOBS}/digits"]["metadata"]["uid"] = "another"
    with pytest.raises(NotFound, match="another job now has its name"):
        next(stream)


def test_waiting_longer_than_allowed_is_a_timeout(client: Client, fake: FakeKube) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), 1)
    fake.texts[JOBS] = [[]]
    with pytest.raises(TimeoutError, match=r"default/digits has not ended within 0\.05 s"):
        client.wait("digits", timeout=0.05)
    with pytest.raises(TimeoutError, match=r"default/digits: checkpoint now is not durable after 0\.05 s"):
        client.wait_for_checkpoint("digits", "now", timeout=0.05)


def test_events_are_those_of_this_job_in_the_order_in_which_they_happened(
    client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes counts an event that happens again, so its version is higher than its time tells."""

    def event_at(second: int, version: int) -> Object:
        return {
            "metadata": {"uid": str(version), "resourceVersion": str(version)},
            "reason": f"R{version}",
            "lastTimestamp": f"2026-01-01T00:00:{second:02}Z",
        }

    asked: list[str | int] = []

    def get(path: str, **query: str | int) -> Object:
        asked.append(query["fieldSelector"])
        return {"items": [event_at(2, 9), event_at(1, 11), event_at(2, 10)]}

    monkeypatch.setattr(fake, "get", get)
    assert [one.reason for one in client.events(Job.of(stored(make_job())))] == ["R11", "R9", "R10"]
    assert asked == ["involvedObject.uid=job-uid"]


def test_a_field_that_the_cluster_does_not_know_is_an_error(
    client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older CRD would drop it without a word."""
    asked: list[Query | None] = []
    request = fake.request

    def noted(method: str, path: str, body: Object | None = None, *, query: Query | None = None) -> Object:
        asked.append(query)
        return request(method, path, body)

    monkeypatch.setattr(fake, "request", noted)
    client.submit(make_job().manifest())
    assert asked == [{"fieldValidation": "Strict"}]


def pod_of(owner: str, number: int, phase: str = "Running") -> Object:
    return {
        "metadata": {"name": f"digits-w{number}", "ownerReferences": [{"uid": owner}]},
        "status": {"phase": phase},
    }


def test_logs_of_all_workers_are_merged_by_time_with_the_rank_of_each(client: Client, fake: FakeKube) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), generation=published("digits-w1", "digits-w0"))
    fake.objects[PODS] = {"items": [*(pod_of("job-uid", number) for number in range(3)), pod_of("older-uid", 3)]}
    fake.texts[f"{PODS}/digits-w3/log"] = [["2026-01-01T00:00:00Z of a job before it"]]
    fake.texts[f"{PODS}/digits-w0/log"] = [["2026-01-01T00:00:01Z one", "2026-01-01T00:00:03Z three"]]
    fake.texts[f"{PODS}/digits-w1/log"] = [["2026-01-01T00:00:02Z two"]]
    fake.texts[f"{PODS}/digits-w2/log"] = []  # its node is lost
    unread, *lines = [(line.rank, line.worker, line.text) for line in client.logs("digits")]
    assert unread[:2] == (None, "digits-w2") and "cannot be read" in unread[2]
    assert lines == [(1, "digits-w0", "one"), (0, "digits-w1", "two"), (1, "digits-w0", "three")]


@pytest.mark.parametrize("words", ["is waiting to start: ContainerCreating", "is not available", "is terminated"])
def test_a_worker_whose_container_never_ran_does_not_hide_the_logs_of_others(
    words: str, client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that cannot admit a pod ends it without starting its container."""
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), conditions=[finished("Failed")])
    fake.objects[PODS] = {"items": [pod_of("job-uid", number, "Failed") for number in range(2)]}
    fake.objects |= {f"{PODS}/digits-w{number}": {"status": {"phase": "Failed"}} for number in range(2)}
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.05)
    said = [f'container "trainer" in pod "digits-w0" {words}']

    def lines(path: str, query: Query, *, silence: float = 0) -> Iterator[str]:
        if "digits-w0" in path:
            raise Refused(said[0])
        yield "2026-01-01T00:00:01Z one"

    monkeypatch.setattr(fake, "lines", lines)
    for follow in (False, True):
        assert [line.text for line in client.logs("digits", follow=follow)] == ["one"]
    said[0] = 'pods "digits-w0" is forbidden'
    with pytest.raises(Refused, match="forbidden"):
        list(client.logs("digits"))


def test_following_asks_for_no_pod_that_waits(client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large job waits long for its nodes, and a list has the phases."""
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.05)
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), conditions=[finished()])
    waiting = {"metadata": {"name": "digits-w2", "ownerReferences": [{"uid": "job-uid"}]}}
    fake.objects[PODS] = {"items": [pod_of("job-uid", 0, "Succeeded"), pod_of("job-uid", 1, "Pending"), waiting]}
    fake.objects[f"{PODS}/digits-w0"] = {"status": {"phase": "Succeeded"}}
    fake.texts[f"{PODS}/digits-w0/log"] = [["2026-01-01T00:00:00Z line"]]
    get, asked = fake.get, set[str]()

    def noted(path: str, **query: str | int) -> Object:
        asked.add(path)
        return get(path, **query)

    monkeypatch.setattr(fake, "get", noted)
    assert [line.text for line in client.logs("digits", follow=True)] == ["line"]
    assert asked == {f"{JOBS}/digits", PODS}


def test_followed_logs_end_when_the_job_has_and_all_was_said(
    client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.05)
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), generation=published("digits-w0"), conditions=[finished()])
    fake.objects[PODS] = {"items": [pod_of("job-uid", 0)]}
    fake.objects[f"{PODS}/digits-w0"] = {"status": {"phase": "Succeeded"}}
    fake.texts[f"{PODS}/digits-w0/log"] = [[f"2026-01-01T00:00:0{n}Z line {n}" for n in range(3)]]
    assert [line.text for line in client.logs("digits", follow=True)] == ["line 0", "line 1", "line 2"]


def test_followed_logs_of_a_job_that_has_ended_are_read_to_their_end(
    client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the reader takes so long for a line that others wait after each poll."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.6 * next(ticks), sleep=time.sleep)
    monkeypatch.setattr(logs, "time", clock)
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), conditions=[finished()])
    fake.objects[PODS] = {"items": [pod_of("job-uid", 0, "Succeeded")]}
    fake.texts[f"{PODS}/digits-w0/log"] = [[f"2026-01-01T00:00:0{n}Z line {n}" for n in range(5)]]
    assert [line.text for line in client.logs("digits", follow=True)] == [f"line {n}" for n in range(5)]


def test_followed_logs_go_on_where_they_were_when_a_stream_breaks(
    client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.05)
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), generation=published("digits-w0"))
    fake.objects[PODS] = {"items": [pod_of("job-uid", 0)]}
    fake.objects[f"{PODS}/digits-w0"] = {"status": {"phase": "Running"}}
    lines = [f"2026-01-01T00:00:0{n}Z line {n}" for n in range(4)]
    fake.texts[f"{PODS}/digits-w0/log"] = [lines[:2], lines[1:3], lines[2:]]
    following = client.logs("digits", follow=True, tail=5)
    assert [next(following).text for _ in range(4)] == ["line 0", "line 1", "line 2", "line 3"]
    asked = [(query.get("tailLines"), query.get("sinceTime")) for query in fake.streams[:3]]
    assert asked == [(5, None), (None, "2026-01-01T00:00:01Z"), (None, "2026-01-01T00:00:02Z")]
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), conditions=[finished()])
    assert list(following) == []


def test_followed_logs_end_although_a_log_was_lost_with_its_node(
    client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.05)
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), conditions=[finished("Failed")])
    fake.objects[PODS] = {"items": [pod_of("job-uid", 0)]}
    fake.texts[f"{PODS}/digits-w0/log"] = []
    assert list(client.logs("digits", follow=True)) == []


def test_followed_logs_miss_no_line_of_a_worker_that_ends_in_an_outage(
    client: Client, fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.05)
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), generation=published("digits-w0"))
    fake.objects[PODS] = {"items": [pod_of("job-uid", 0)]}
    fake.objects[f"{PODS}/digits-w0"] = {"status": {"phase": "Running"}}
    lines = [f"2026-01-01T00:00:0{n}Z line {n}" for n in range(4)]
    fake.texts[f"{PODS}/digits-w0/log"] = [lines[:2], lines[1:]]
    following = client.logs("digits", follow=True)
    assert [next(following).text for _ in range(2)] == ["line 0", "line 1"]
    fake.outage = 4
    fake.objects[f"{PODS}/digits-w0"] = {"status": {"phase": "Failed"}}
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), conditions=[finished()])
    assert [line.text for line in following] == ["line 2", "line 3"]
    assert fake.outage == 0


def archive(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w|") as writer:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(content)
            writer.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_a_finished_jobs_model_comes_through_a_pod_that_is_then_deleted(
    client: Client, fake: FakeKube, tmp_path: Path
) -> None:
    job = make_job().set("output.location", "/storage")
    fake.objects[f"{JOBS}/digits"] = stored(job, conditions=[finished()])
    weights = bytes(range(256)) * 1000
    asked: list[Sequence[str]] = []

    def run(pod: str, container: str, command: Sequence[str]) -> Iterator[bytes]:
        asked.append(command)
        packed = archive(model=weights)
        return (packed[start : start + 999] for start in range(0, len(packed), 999))

    fake.containers = run
    assert client.fetch_model("digits", tmp_path / "model") == tmp_path / "model"
    assert (tmp_path / "model" / "model").read_bytes() == weights
    assert "/storage/digits/model" in asked[0]
    (_, _, pod), (deleted, path, options) = fake.requests
    assert deleted == "DELETE" and path == f"{PODS}/{pod['metadata']['name']}"
    assert "gracePeriodSeconds" not in options, "forced: the pod would be gone before its container"


@pytest.mark.timeout(60)
def test_the_reading_pod_ends_when_it_is_told_to() -> None:
    """Runs the command as a container's first process, which ignores signals with default handling."""
    pod = reader_pod(Job.of(stored(make_job().set("output.location", "/storage"))))
    (reader,) = pod["spec"]["containers"]
    command = ["sh", "-c", "trap '' TERM; echo; exec \"$@\"", "sh", *reader["command"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            while process.poll() is None:  # at some point during its start
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
        finally:
            process.kill()
    assert process.returncode == 0


def test_the_reading_pods_grace_is_its_own() -> None:
    spec = {"containers": [{"name": "trainer"}], "terminationGracePeriodSeconds": 0}
    pod = reader_pod(Job.of(stored(make_job().set("podTemplate.spec", spec).set("output.location", "/storage"))))
    assert pod["spec"]["terminationGracePeriodSeconds"] > 0


def test_a_command_that_fails_in_the_pod_is_an_error_with_its_words(
    client: Client, fake: FakeKube, tmp_path: Path
) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job().set("output.location", "/storage"), conditions=[finished()])

    def run(pod: str, container: str, command: Sequence[str]) -> Iterator[bytes]:
        yield b""
        raise ClientError("there is no /storage/digits/model")

    fake.containers = run
    with pytest.raises(ClientError, match="no /storage/digits/model"):
        client.fetch_model("digits", tmp_path / "model")
    assert fake.requests[-1][0] == "DELETE"


def test_what_is_fetched_from_a_url_is_no_pattern(tmp_path: Path) -> None:
    for name in ("lr[12]", "lr1"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config").write_text(name)
    fetched = fetch_from_url(f"file://{tmp_path}/lr[12]", tmp_path / "here")
    assert (fetched / "model" / "config").read_text() == "lr[12]"
    assert [path.name for path in fetched.rglob("*")] == ["model", "config"]


def test_what_a_store_of_objects_holds_by_now_is_fetched(object_store: "ObjectStore", tmp_path: Path) -> None:
    output = f"{object_store.new_bucket()}/digits"
    object_store.put(f"{output}/model/")  # as its console makes an empty folder
    object_store.put(f"{output}/model/config.json", b"old")
    fetch_from_url(f"s3://{output}/model", tmp_path)
    object_store.put(f"{output}/model/config.json", b"the new one")
    object_store.put(f"{output}/model/tokens/vocabulary", b"words")
    fetch_from_url(f"s3://{output}/model", tmp_path)

    fetched = {
        path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert fetched == {"config.json": "the new one", "tokens/vocabulary": "words"}
    with pytest.raises(NothingToFetch, match="there is no folder s3://nowhere/model"):
        fetch_from_url("s3://nowhere/model", tmp_path)


def test_why_a_store_of_objects_gives_nothing_is_said(
    object_store: "ObjectStore", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{object_store.new_bucket()}/model"
    with (
        object_store.answering("GET ", "403 AccessDenied"),
        pytest.raises(ClientError, match=f"{url} cannot be copied: PermissionError: AccessDenied, it is said"),
    ):
        fetch_from_url(url, tmp_path)
    object_store.forget_clients()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ClientError, match=f"{url} cannot be copied: NoCredentialsError: Unable to locate"):
        fetch_from_url(url, tmp_path)


@pytest.mark.parametrize("runs", [True, False])
def test_a_reading_pod_that_was_taken_away_hides_neither_the_model_nor_the_reason(
    runs: bool, client: Client, fake: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job().set("output.location", "/storage"), conditions=[finished()])
    fake.containers = lambda *_: iter([archive(config=b"{}")])
    request = fake.request

    def evicting(method: str, path: str, body: Object | None = None) -> Object:
        if method == "DELETE":
            raise NotFound(f"{path} not found")
        answer = request(method, path, body)
        if not runs:
            del fake.objects[f"{path}/{answer['metadata']['name']}"]
        return answer

    monkeypatch.setattr(fake, "request", evicting)
    if runs:
        assert (client.fetch_model("digits", tmp_path) / "config").read_bytes() == b"{}"
    else:
        with pytest.raises(ClientError, match="should read the job's volume, but is gone"):
            client.fetch_model("digits", tmp_path)


def test_the_record_of_a_job_that_trains_comes_through_its_leader(
    client: Client, fake: FakeKube, tmp_path: Path
) -> None:
    """Also files that are on no volume."""
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), generation=published("digits-w1", "digits-w0"))
    fake.objects[f"{PODS}/digits-w1"] = {"status": {"phase": "Running"}}
    asked: list[tuple[str, str, Sequence[str]]] = []

    def run(pod: str, container: str, command: Sequence[str]) -> Iterator[bytes]:
        asked.append((pod, container, command[3:]))
        return iter([archive(**{"events.jsonl": b"1\n", "steps.jsonl": b"2\n"})])

    fake.containers = run
    assert (client.fetch_record("digits", tmp_path) / "steps.jsonl").read_bytes() == b"2\n"
    assert asked == [("digits-w1", "trainer", ["$RUN_DIR", "events.jsonl", "steps.jsonl"])]
    assert fake.requests == []
    for phase, conditions in (("Failed", []), ("Running", [finished()])):  # it may still end after the job has
        fake.objects[f"{PODS}/digits-w1"] = {"status": {"phase": phase}}
        fake.objects[f"{JOBS}/digits"]["status"]["conditions"] = conditions
        with pytest.raises(NothingToFetch, match=r"no spec\.output on a volume"):
            client.fetch_record("digits", tmp_path)


def test_a_model_is_fetched_into_no_folder_whose_files_would_become_a_part_of_it(
    client: Client, fake: FakeKube, tmp_path: Path
) -> None:
    source = tmp_path / "there" / "digits" / "model"
    source.mkdir(parents=True)
    (source / "model.safetensors").write_bytes(b"weights")
    fake.objects[f"{JOBS}/digits"] = stored(make_job().set("output.location", f"file://{tmp_path}/there"))
    folder = tmp_path / "here"
    folder.mkdir()
    client.fetch_model("digits", folder)
    (source / "model.safetensors").unlink()
    (source / "chat_template.jinja").touch()
    with pytest.raises(FileExistsError, match=f"{folder} is not empty: name a new folder"):
        client.fetch_model("digits", folder)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_a_job_without_output_has_nothing_to_fetch(client: Client, fake: FakeKube, tmp_path: Path) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job(), conditions=[finished()])
    with pytest.raises(NothingToFetch, match=r"spec\.output"):
        client.fetch_model("digits", tmp_path)


def test_a_model_behind_a_url_is_read_from_there(client: Client, fake: FakeKube, tmp_path: Path) -> None:
    source = tmp_path / "there" / "digits" / "model"
    source.mkdir(parents=True)
    (source / "model.safetensors").write_bytes(b"weights")
    job = make_job().set("output.location", f"file://{tmp_path}/there")
    fake.objects[f"{JOBS}/digits"] = stored(job, conditions=[finished()])
    client.fetch_model("digits", tmp_path / "here")
    assert (tmp_path / "here" / "model.safetensors").read_bytes() == b"weights"


def test_the_reader_has_the_workers_volumes_and_security_and_no_accelerator() -> None:
    container: Object = {
        "name": "trainer",
        "image": "own",
        "resources": {"limits": {"nvidia.com/gpu": 1}, "claims": [{"name": "gpu"}]},
        "volumeMounts": [{"name": "storage", "mountPath": "/storage"}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    volumes = [{"name": "storage", "persistentVolumeClaim": {"claimName": "storage"}}]
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    spec: Object = {"containers": [container], "volumes": volumes, "securityContext": {"runAsNonRoot": True}}
    spec |= {"resourceClaims": claims, "resources": {"limits": {"nvidia.com/gpu": 1}}}
    container |= {"imagePullPolicy": "Always", "command": ["train"], "args": ["--fast"]}
    spec |= {"initContainers": [{"name": "warm", **container}], "restartPolicy": "Always"}
    pod = reader_pod(Job.of(stored(make_job().set("podTemplate.spec", spec).set("output.location", "/storage"))))
    (reader,) = pod["spec"]["containers"]
    assert reader["image"] == "own" and reader["volumeMounts"] == container["volumeMounts"]
    assert reader["securityContext"] == container["securityContext"]
    assert all(reader["resources"][of].keys() == {"cpu", "memory"} for of in ("requests", "limits"))
    assert not {"resourceClaims", "resources"} & pod["spec"].keys()
    assert reader["imagePullPolicy"] == "Always" and "args" not in reader
    assert pod["spec"]["initContainers"] == [] and pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["activeDeadlineSeconds"] > 0 and not pod["spec"]["automountServiceAccountToken"]
    assert pod["spec"]["volumes"] == volumes and pod["spec"]["securityContext"] == {"runAsNonRoot": True}
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "job-uid"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "Pending$"),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4"}]},
            "Pending: Unschedulable: 0/4",
        ),
        (
            {
                "conditions": [{"type": "PodScheduled", "status": "True"}],
                "containerStatuses": [{"name": "reader", "state": {"waiting": {"reason": "ImagePullBackOff"}}}],
            },
            "Pending: ImagePullBackOff$",
        ),
    ],
    ids=["unknown", "no node", "no image"],
)
def test_a_reading_pod_that_does_not_start_says_why(
    status: Object, words: str, client: Client, fake: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.objects[f"{JOBS}/digits"] = stored(make_job().set("output.location", "/storage"), conditions=[finished()])
    monkeypatch.setattr(fetch, "START_SECONDS", 0)
    request = fake.request

    def pending(method: str, path: str, body: Object | None = None) -> Object:
        answer = request(method, path, body)
        if method == "POST" and body is not None:
            fake.objects[f"{path}/{body['metadata']['name']}"]["status"] = {"phase": "Pending", **status}
        return answer

    monkeypatch.setattr(fake, "request", pending)
    with pytest.raises(ClientError, match=f"should read the job's volume, but is {words}"):
        client.fetch_model("digits", tmp_path / "model")
    assert fake.requests[-1][0] == "DELETE"
