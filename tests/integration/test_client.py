"""The client and the command line against a real API server and the real operator."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import yaml

from pipetransformer_client import AlreadyExists, Client, ClientError, NotFound, Refused, Unavailable, fetch
from pipetransformer_client.fetch import reader_pod
from pipetransformer_client.kube import Kube
from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_contract.api.status import State
from tests.testkit.cluster.installing import with_token
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.fake_kubelet import FakeKubelet
from tests.testkit.operator.jobs import packing_job
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import Operator

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def client(kubeconfig: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    return Client.connect(namespace=namespace.name)


async def command(namespace: Namespace, *words: str) -> tuple[int, str, str]:
    """Runs the command line in the namespace; exit code, standard output and error."""
    return await _ended(await _started(namespace, *words))


async def _started(namespace: Namespace, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pipetransformer_client", *words, "-n", namespace.name,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def _ended(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_job_is_submitted_watched_and_described_from_the_command_line(
    client: Client, namespace: Namespace, operator: Operator, kubelet: FakeKubelet, tmp_path: Path
) -> None:
    manifest = packing_job().set("output", {"location": str(namespace.folder)}).manifest()
    del manifest["metadata"]["namespace"]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    code, said, _ = await command(namespace, "submit", str(file))
    assert (code, said) == (0, f"{namespace.name}/digits created\n")
    watch = await _started(namespace, "watch", "digits")
    assert watch.stdout is not None
    first = (await watch.stdout.readline()).decode()
    assert await namespace.layout(1) == (4, 1)
    namespace.advance(15)
    assert await namespace.layout(2) == (2, 2)

    code, table, _ = await command(namespace, "list")
    assert code == 0
    assert table.splitlines()[1].split()[:6] == ["digits", "Running", "2", "2", "4", "8/12"]

    namespace.advance(30)
    code, lines, _ = await _ended(watch)
    assert code == 0
    assert "digits is complete" in lines
    assert "GenerationPublished" in first + lines and "frozen 8/12" in lines
    code, text, _ = await command(namespace, "describe", "digits")
    assert code == 0
    assert "pipeline 3" in text and "TrainingSucceeded" in text
    code, machine, _ = await command(namespace, "describe", "digits", "-o", "json")
    assert json.loads(machine)["status"]["generation"]["pipelines"] == 4


async def test_the_client_streams_a_jobs_life_and_waits_for_its_end(
    client: Client, namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    manifest = packing_job().set("output", {"location": str(namespace.folder)}).manifest()
    del manifest["metadata"]["namespace"]
    job = await asyncio.to_thread(client.submit, manifest)
    assert (job.namespace, job.status.state) == (namespace.name, State.PENDING)
    with pytest.raises(AlreadyExists, match="digits"):
        await asyncio.to_thread(client.submit, manifest)
    generations: list[int] = []

    def live() -> None:
        for change in client.stream("digits", timeout=100):
            generations.append(change.status.layout_generation)

    streaming = asyncio.create_task(asyncio.to_thread(live))
    for generation, step in ((1, 15), (2, 25), (3, 30)):
        await namespace.layout(generation)
        namespace.advance(step)
    await streaming
    assert sorted(set(generations)) == [0, 1, 2, 3] and generations == sorted(generations)
    ended = await asyncio.to_thread(client.wait, "digits", timeout=5)
    assert ended.finished and ended.failure == ""
    assert ended.rank(ended.status.generation.members[2].name if ended.status.generation else "") == 2

    async def told() -> bool:
        return "TrainingSucceeded" in {event.reason for event in await asyncio.to_thread(client.events, ended)}

    await until("the end is told", told)
    await asyncio.to_thread(client.delete, "digits")
    with pytest.raises(NotFound):
        await asyncio.to_thread(client.get, "digits")


async def test_what_a_user_may_not_do_is_said_in_the_api_servers_words(
    namespace: Namespace, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = namespace.core
    await namespace.api.request("POST", f"{core}/serviceaccounts", {"metadata": {"name": "nobody"}})
    answer = await namespace.api.request("POST", f"{core}/serviceaccounts/nobody/token", {"spec": {}})
    own = with_token(kubeconfig, answer["status"]["token"], tmp_path / "nobody")
    monkeypatch.setenv("KUBECONFIG", str(own))
    client = Client.connect(namespace=namespace.name)
    with pytest.raises(Refused, match=r"serviceaccount.*nobody.*cannot list"):
        await asyncio.to_thread(client.jobs)


async def test_the_documented_rights_suffice(
    namespace: Namespace, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/cli.md, "Rights". No kubelet is here: what is asked of a pod fails, but not for want of a right."""
    await namespace.apply(make_job().set("output", {"location": "/storage"}))
    token = await with_rights(
        namespace,
        (["training.pipetransformer.io"], "pipetrainingjobs", ["get", "list", "watch", "create", "patch", "delete"]),
        ([""], "events", ["list"]),
        ([""], "pods", ["get", "list", "create", "delete"]),
        ([""], "pods/log", ["get"]),
        ([""], "pods/exec", ["get", "create"]),
    )
    monkeypatch.setenv("KUBECONFIG", str(with_token(kubeconfig, token, tmp_path / "user")))
    monkeypatch.setattr(fetch, "START_SECONDS", 0)
    client = Client.connect(namespace=namespace.name)
    (job,) = await asyncio.to_thread(client.jobs)
    assert await asyncio.to_thread(lambda: next(client.stream("digits")).uid) == job.uid
    assert await asyncio.to_thread(client.events, job) == []
    with pytest.raises(ClientError, match="should read the job's volume, but is Pending"):
        await asyncio.to_thread(client.fetch_model, "digits", tmp_path / "model")
    assert await namespace.pods() == {}
    kube = Kube.connect()
    pod = reader_pod(job)
    pod["metadata"]["labels"] = {JOB_LABEL: "digits"}
    pod["spec"]["containers"][0]["name"] = job.trainer
    await asyncio.to_thread(kube.request, "POST", f"{namespace.core}/pods", pod)
    assert await asyncio.to_thread(lambda: list(client.logs("digits"))) == []
    name = pod["metadata"]["name"]
    with pytest.raises(Unavailable, match="Handshake status 400"):
        await asyncio.to_thread(lambda: list(kube.execute(namespace.name, name, job.trainer, ["true"])))
    scaled = await asyncio.to_thread(client.scale, "digits", 3)
    assert scaled.manifest["spec"]["elasticPolicy"] == {**job.manifest["spec"]["elasticPolicy"], "maxWorkers": 3}
    await asyncio.to_thread(client.delete, "digits")


async def test_a_job_is_suspended_resumed_and_scaled_from_the_command_line(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet
) -> None:
    await namespace.apply(packing_job().checkpoint(str(namespace.folder)))
    assert await namespace.layout(1) == (4, 1)
    assert await command(namespace, "suspend", "digits") == (0, f"{namespace.name}/digits suspended\n", "")
    job = await asyncio.to_thread(Client.connect(namespace=namespace.name).get, "digits")
    assert job.manifest["spec"]["suspend"] is True
    assert await command(namespace, "resume", "digits") == (0, f"{namespace.name}/digits resumed\n", "")
    code, _, told = await command(namespace, "scale", "digits", "0")
    assert code == 2
    await namespace.apply(make_job("kept"))
    code, _, told = await command(namespace, "suspend", "kept")
    assert code == 3 and "suspend needs spec.checkpoint" in told


async def with_rights(namespace: Namespace, *rules: tuple[list[str], str, list[str]]) -> str:
    """A ServiceAccount with these rights (API groups, resource, verbs) in the namespace; its token."""
    rights = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace.name}"
    role = [{"apiGroups": groups, "resources": [resource], "verbs": verbs} for groups, resource, verbs in rules]
    named: Object = {"metadata": {"name": "user"}}
    subject = {"kind": "ServiceAccount", "name": "user", "namespace": namespace.name}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "user"}
    await namespace.api.request("POST", f"{namespace.core}/serviceaccounts", named)
    await namespace.api.request("POST", f"{rights}/roles", {**named, "rules": role})
    await namespace.api.request(
        "POST", f"{rights}/rolebindings", {**named, "subjects": [subject], "roleRef": reference}
    )
    answer = await namespace.api.request("POST", f"{namespace.core}/serviceaccounts/user/token", {"spec": {}})
    return str(answer["status"]["token"])
