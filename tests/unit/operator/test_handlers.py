"""kopf itself on an API server that expires its watches: what it says of jobs, and what it does not."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import kopf
import pytest
from aiohttp import web

from pipetransformer_contract.api import GROUP, KIND, PLURAL, VERSION
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator import handlers
from pipetransformer_operator.controller.ports import JobKey
from pipetransformer_operator.handlers import session
from pipetransformer_operator.kube.client.api import Api
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.store import ParsedJobs
from pipetransformer_operator.kube.watches.jobs import KnownJobs
from pipetransformer_operator.service import Service
from pipetransformer_operator.settings import Settings

pytestmark = pytest.mark.timeout(60)
JOBS = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
NAMESPACES = {"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": False, "verbs": ["list"]}
RESOURCE = {"name": PLURAL, "singularName": "", "kind": KIND, "namespaced": True, "verbs": ["list", "watch", "patch"]}


class Server:
    """Serves one kind, but not in the namespace `closed`, and ends each watch of it by 410 once told to.

    Attributes:
        discovered: paths of requests that look for kinds.
        refuses: so many of the first requests for jobs are answered with 401.
        refused: when they were.
    """

    def __init__(self) -> None:
        self.version = 5
        self.jobs: list[Object] = []
        self.expired = asyncio.Event()
        self.watched = asyncio.Semaphore(0)
        self.discovered: list[str] = []
        self.refused: list[float] = []
        self.refuses = 0

    def application(self) -> web.Application:
        app = web.Application()
        of_namespace = JOBS.replace(PLURAL, "namespaces/{namespace}/" + PLURAL)
        app.add_routes([web.get(JOBS, self.list_or_watch), web.get(of_namespace, self.list_or_watch)])
        app.add_routes([web.get("/{path:.*}", self.discover)])
        return app

    async def discover(self, request: web.Request) -> web.Response:
        self.discovered.append(request.path)
        served = {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}
        answers: dict[str, Object] = {
            "/api": {"versions": ["v1"]},
            "/api/v1": {"groupVersion": "v1", "resources": [NAMESPACES]},
            "/apis": {"groups": [{"name": GROUP, "preferredVersion": served, "versions": [served]}]},
            f"/apis/{GROUP}/{VERSION}": {"groupVersion": f"{GROUP}/{VERSION}", "resources": [RESOURCE]},
        }
        return web.json_response(answers[request.path])

    async def list_or_watch(self, request: web.Request) -> web.StreamResponse:
        if len(self.refused) < self.refuses:
            self.refused.append(asyncio.get_running_loop().time())
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if request.match_info.get("namespace") == "closed":
            return web.json_response({"kind": "Status", "code": 403}, status=403)
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": self.jobs})
        response = web.StreamResponse()
        await response.prepare(request)
        self.watched.release()
        await self.expired.wait()
        self.expired.clear()
        await response.write(json.dumps({"type": "ERROR", "object": {"code": 410}}).encode() + b"\n")
        return response


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    server = Server()
    runner = web.AppRunner(server.application(), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(content))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield server
    await runner.cleanup()


@pytest.fixture
def behind_proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The same server as a proxy: the kubeconfig names a host that does not exist."""
    file = Path(os.environ["KUBECONFIG"])
    content = json.loads(file.read_text())
    cluster = content["clusters"][0]["cluster"]
    monkeypatch.setenv("http_proxy", cluster["server"])
    cluster["server"] = "http://kubernetes.example"
    file.write_text(json.dumps(content))
    return server


class Watched(ClusterListener):
    """What is known of jobs by kopf's watches of these namespaces, all when empty."""

    def __init__(self, api: Api, *namespaces: str) -> None:
        self.changed: asyncio.Queue[JobKey] = asyncio.Queue()
        self.gone: asyncio.Queue[JobKey] = asyncio.Queue()
        self.refused: asyncio.Queue[str] = asyncio.Queue()
        self.known = KnownJobs(api, ParsedJobs(), self)
        health = SimpleNamespace(on_watch_opened=lambda path: None, on_watch_refused=self.refused.put_nowait)
        metrics = SimpleNamespace(on_api_request=lambda *request: None)
        service: Any = SimpleNamespace(jobs=self.known, health=health, metrics=metrics)
        registry = kopf.OperatorRegistry()
        handlers._register(registry, cast("Service", service))
        where: Any = {"namespaces": namespaces} if namespaces else {"clusterwide": True}
        watching = kopf.operator(registry=registry, settings=handlers._kopf_settings(), standalone=True, **where)
        self._tasks = [asyncio.create_task(self.known.run()), asyncio.create_task(watching)]

    def on_job_changed(self, key: JobKey) -> None:
        self.changed.put_nowait(key)

    def on_job_gone(self, key: JobKey) -> None:
        self.gone.put_nowait(key)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    api = await Api.connect()
    yield api
    await api.close()


def job(namespace: str) -> Object:
    metadata = {"namespace": namespace, "name": "digits", "uid": "uid", "resourceVersion": "3"}
    return {"metadata": metadata}


async def test_jobs_are_watched_through_the_proxy_by_which_the_api_server_is_reached(
    behind_proxy: Server,
) -> None:
    behind_proxy.jobs = [job("a")]
    api = await Api.connect()
    watched = Watched(api)
    try:
        assert await watched.changed.get() == JobKey("a", "digits")
    finally:
        await watched.stop()
        await api.close()


async def test_a_job_that_a_new_list_lacks_is_gone_although_kopf_is_silent(server: Server, api: Api) -> None:
    server.jobs = [job("a")]
    watched = Watched(api)
    await server.watched.acquire()
    await watched.changed.get()
    seen = watched.known.of(JobKey("a", "digits"))
    assert seen is not None
    server.jobs, server.version = [], 9
    server.expired.set()
    await server.watched.acquire()
    assert await watched.gone.get() == JobKey("a", "digits")
    await watched.stop()


async def test_a_namespace_that_may_not_be_seen_holds_up_no_other(server: Server, api: Api) -> None:
    server.jobs = [job("open")]
    watched = Watched(api, "closed", "open")
    assert await watched.refused.get() == JOBS.replace(PLURAL, f"namespaces/closed/{PLURAL}")
    assert await watched.changed.get() == JobKey("open", "digits")
    await watched.stop()


async def test_a_part_that_fails_ends_the_operator_instead_of_itself_alone() -> None:
    ended = asyncio.Event()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def goes_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ZeroDivisionError):
        await handlers.until_one_ends(fails(), goes_on())
    assert ended.is_set()


async def test_refused_credentials_are_tried_again_later_and_later(
    server: Server, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FIRST_BACKOFFS", (0.1, 0.2, 0.4))
    server.jobs, server.refuses = [job("a")], 4
    watched = Watched(api)
    await watched.changed.get()
    await watched.stop()
    pauses = [after - before for before, after in itertools.pairwise(server.refused)]
    assert all(pause > 0.9 * least for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=True)), pauses


class Leader:
    """A service that leads, on a cluster whose CRD is gone until `serves` is set."""

    def __init__(self, api: Api) -> None:
        self.serves, self.asked = asyncio.Event(), asyncio.Event()
        self.metrics = SimpleNamespace(on_api_request=lambda *request: None)
        self.health = SimpleNamespace(on_watch_opened=lambda path: None, on_watch_refused=lambda path: None)
        self.jobs = KnownJobs(api, ParsedJobs(), ClusterListener())

    async def lead(self) -> None:
        """It leads at once."""

    async def until_served(self) -> None:
        self.asked.set()
        await self.serves.wait()

    async def keep_leading(self) -> None:
        await asyncio.Event().wait()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Nothing runs."""


async def test_kopf_looks_for_the_kind_of_jobs_once_the_cluster_serves_it(
    server: Server, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks only once, so it would never watch a kind that was not there."""
    leader = Leader(api)

    async def start(settings: Settings) -> Leader:
        return leader

    monkeypatch.setattr(Service, "start", start)
    operating = asyncio.create_task(handlers.operate(Settings("system", "b", "https://operator.system.svc:8443")))
    await leader.asked.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert server.discovered == []
    leader.serves.set()
    await server.watched.acquire()
    assert server.discovered.count("/apis") == 1
    operating.cancel()
    await asyncio.gather(operating, return_exceptions=True)


class Spare:
    """A service whose lease another operator holds."""

    metrics = None

    def __init__(self) -> None:
        self.waits, self.stopped = asyncio.Event(), False

    async def lead(self) -> None:
        self.waits.set()
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stopped = True


async def test_an_operator_that_waits_for_the_lease_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container nothing else would end it before its grace period is over. It would take the leader's lease."""
    spare = Spare()

    async def start(settings: Settings) -> Spare:
        return spare

    monkeypatch.setattr(Service, "start", start)
    ends = asyncio.create_task(handlers.operate(Settings("system", "b", "https://operator.system.svc:8443")))
    await spare.waits.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await ends
    assert spare.stopped
