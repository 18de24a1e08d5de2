"""The client of the API server: how it is connected."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiolimiter import AsyncLimiter

from pipetransformer_contract.api.requests import APPLY_PATCH
from pipetransformer_operator.controller.ports import Conflict, Invalid, Refused, Unavailable
from pipetransformer_operator.kube.client import api as kube_api
from pipetransformer_operator.kube.client.api import Api, NotFound
from tests.testkit.operator.kubeconfig import kubeconfig

pytestmark = pytest.mark.timeout(60)


#: What a watch of `/expiring` says: events that parts of the stream cut, and that its version is no longer kept.
PARTS = (b'{"type": "ADDED", "object": 1}\n{"type": "MODI', b'FIED", "object": 2}\n')
EXPIRED = b'{"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}\n'


async def serve(answer: web.Request) -> web.StreamResponse:
    if answer.path.startswith("/refused/"):
        return web.json_response({}, status=int(answer.path.rpartition("/")[2]))
    if answer.path == "/of-a-proxy":
        return web.Response(text="<html>Log in</html>\n", content_type="text/html")
    if answer.path == "/expiring":
        stream = web.StreamResponse()
        await stream.prepare(answer)
        for part in (*PARTS, EXPIRED):
            await stream.write(part)
        return stream
    if "watch" in answer.query:  # of what does not change: without a word until its time is over, or a second
        silent = web.StreamResponse()
        await silent.prepare(answer)
        await asyncio.sleep(1 if answer.path == "/ending" else float(answer.query["timeoutSeconds"]))
        return silent
    if "/namespaces/slow/" in answer.path:
        await asyncio.Event().wait()
    if answer.path.startswith("/codes/"):
        return web.json_response({"message": "the webhook is down"}, status=int(answer.path.rpartition("/")[2]))
    if answer.path == "/parts":  # a list of three objects, one an answer
        number = int(answer.query.get("continue", "1"))
        following = {} if number == 3 else {"continue": str(number + 1)}
        return web.json_response({"metadata": following, "items": [number], "asked": dict(answer.query)})
    about = {"query": dict(answer.query), "type": answer.headers.get("Content-Type")}
    return web.json_response(about | {"host": answer.host, "user": answer.headers.get("Authorization")})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = web.Application()
    app.add_routes([web.get("/{path:.*}", serve), web.post("/{path:.*}", serve), web.patch("/{path:.*}", serve)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield int(runner.addresses[0][1])
    await runner.cleanup()


async def test_a_netrc_file_is_not_looked_into(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("default login other password other")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    api = await Api.connect()
    try:
        assert (await api.get("/version"))["user"] == "Bearer secret"
    finally:
        await api.close()


async def test_a_limiter_delays_requests_beyond_its_burst(port: int, tmp_path: Path) -> None:
    """Two at once, and then five a second."""
    api = await Api.connect(limiter=AsyncLimiter(2, 0.4), kubeconfig=kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    loop = asyncio.get_running_loop()
    began = loop.time()
    ended = []
    try:
        for _ in range(4):
            await api.get("/version")
            ended.append(loop.time() - began)
    finally:
        await api.close()
    assert ended[2] >= 0.19 and ended[3] >= 0.39


#: A read that fails by 401, 410 or 500 may succeed a moment later, such as a list while etcd elects a leader. If it
#: counted as refused, an operator that starts would decide without the nodes.
READS = [
    *[(404, NotFound), (403, Refused), (429, Unavailable), (503, Unavailable)],
    *[(401, Unavailable), (410, Unavailable), (500, Unavailable)],
]
WRITES = [
    *[(404, NotFound), (409, Conflict), (403, Refused), (500, Refused), (429, Unavailable), (503, Unavailable)],
    *[(400, Invalid), (413, Invalid), (422, Invalid)],
]


@pytest.mark.parametrize(
    ("method", "code", "kind"), [*(("GET", *row) for row in READS), *(("POST", *row) for row in WRITES)]
)
async def test_an_answer_that_is_no_success_is_sorted_by_what_to_do_about_it(
    method: str, code: int, kind: type[Exception], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    api = await Api.connect()
    try:
        with pytest.raises(kind, match=f"{code} the webhook is down") as raised:
            await api.request(method, f"/codes/{code}")
        assert raised.type is kind
    finally:
        await api.close()


async def test_a_namespace_that_does_not_answer_holds_up_no_other(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    monkeypatch.setattr(kube_api, "PARALLEL", 4)
    api = await Api.connect()
    try:
        async with asyncio.TaskGroup() as tasks:
            slow = [tasks.create_task(api.get(f"/api/v1/namespaces/slow/pods/{number}")) for number in range(4)]
            await asyncio.sleep(0)
            assert await api.get("/api/v1/namespaces/quick/pods/0")
            assert await api.get("/version")
            for one in slow:
                one.cancel()
    finally:
        await api.close()


async def test_any_number_of_watches_leaves_connections_for_requests(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    api, opened = await Api.connect(), asyncio.Semaphore(0)

    async def watch(namespace: int) -> None:
        async for _ in api.watch(f"/api/v1/namespaces/{namespace}/pods", "1", 60, opened=opened.release):
            pass

    try:
        async with asyncio.TaskGroup() as tasks:
            watches = [tasks.create_task(watch(namespace)) for namespace in range(101)]
            for _ in watches:
                await opened.acquire()
            assert await api.get("/version")
            for one in watches:
                one.cancel()
    finally:
        await api.close()


async def test_the_environments_proxy_is_used_unless_the_server_is_exempt(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, "http://kubernetes.example"))
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    api = await Api.connect()
    try:
        assert (await api.get("/version"))["host"] == "kubernetes.example"
    finally:
        await api.close()
    monkeypatch.setenv("no_proxy", ".example")
    api = await Api.connect()
    try:
        assert not api._client.configuration.proxy
    finally:
        await api.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_a_server_on_loopback_is_not_looked_for_behind_a_proxy(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"https://{host}:6443"))
    monkeypatch.setenv("https_proxy", "http://proxy.example")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    api = await Api.connect()
    try:
        assert not api._client.configuration.proxy
    finally:
        await api.close()


async def test_an_empty_variable_means_the_file_at_home(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig(tmp_path, f"http://127.0.0.1:{port}", ".kube/config")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "")
    api = await Api.connect()
    try:
        assert (await api.get("/version"))["host"] == f"127.0.0.1:{port}"
    finally:
        await api.close()


@pytest.mark.parametrize("content", ["a: [", "- a", "text", "", "current-context: c"])
async def test_a_file_that_is_no_kubeconfig_is_named(content: str, tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(content)
    with pytest.raises(Unavailable, match=f"cannot read the kubeconfig {file}: "):
        await Api.connect(kubeconfig=file)


async def test_a_watch_may_be_silent_until_the_server_sends_bookmarks(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    monkeypatch.setattr(kube_api, "BOOKMARK_SECONDS", 0.1)
    api = await Api.connect()
    try:
        await api.get("/version")  # opens a connection, which may take longer than the watches may be silent
        monkeypatch.setattr(kube_api, "TIMEOUT_SECONDS", 0.3)
        assert [event async for event in api.watch("/ending", "1", 60)] == []
        with pytest.raises(Unavailable):
            [event async for event in api.watch("/watched", "1", 60, bookmarked=True)]
    finally:
        await api.close()


async def test_a_watch_whose_version_the_server_no_longer_keeps_breaks(port: int, tmp_path: Path) -> None:
    api = await Api.connect(kubeconfig=kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    seen = []
    try:
        with pytest.raises(Unavailable, match="watch /expiring: too old resource version"):
            async for event in api.watch("/expiring", "1", 1):
                seen.append((event["type"], event["object"]))
    finally:
        await api.close()
    assert seen == [("ADDED", 1), ("MODIFIED", 2)]


async def test_a_watch_that_the_server_refuses_is_unavailable_and_never_opens(port: int, tmp_path: Path) -> None:
    api = await Api.connect(kubeconfig=kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    opened: list[str] = []
    try:
        with pytest.raises(Unavailable, match="watch /refused/410: 410"):
            [event async for event in api.watch("/refused/410", "1", 1, opened=lambda: opened.append("watch"))]
    finally:
        await api.close()
    assert opened == []


@pytest.mark.parametrize(("code", "error"), [(403, Refused), (404, NotFound)])
async def test_a_watch_without_the_right_or_the_kind_says_so(
    port: int, tmp_path: Path, code: int, error: type[Exception]
) -> None:
    api = await Api.connect(kubeconfig=kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    try:
        with pytest.raises(error, match=f"watch /refused/{code}: {code}"):
            [event async for event in api.watch(f"/refused/{code}", "1", 1)]
    finally:
        await api.close()


async def test_an_answer_that_is_not_json_counts_as_none(port: int, tmp_path: Path) -> None:
    api = await Api.connect(kubeconfig=kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    try:
        with pytest.raises(Unavailable, match="GET /of-a-proxy: the answer is not JSON: is a proxy"):
            await api.get("/of-a-proxy")
        with pytest.raises(Unavailable, match="watch /of-a-proxy: the answer is not JSON: is a proxy"):
            [event async for event in api.watch("/of-a-proxy", "1", 1)]
    finally:
        await api.close()


async def test_a_list_is_read_part_by_part_to_its_end(port: int, tmp_path: Path) -> None:
    api = await Api.connect(kubeconfig=kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    try:
        parts = [part async for part in api.list("/parts", {"labelSelector": "ours"})]
    finally:
        await api.close()
    assert [part["items"] for part in parts] == [[1], [2], [3]]
    asked = {"labelSelector": "ours", "limit": "250"}
    assert [part["asked"] for part in parts] == [asked, asked | {"continue": "2"}, asked | {"continue": "3"}]


async def test_a_request_asks_for_strictness_or_ownership_where_it_needs_them(port: int, tmp_path: Path) -> None:
    api = await Api.connect(kubeconfig=kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
    try:
        plain = await api.request("POST", "/made", {})
        strict = await api.request("POST", "/made", {}, strict=True)
        applied = await api.request("PATCH", "/made", {}, content_type=APPLY_PATCH)
    finally:
        await api.close()
    assert (plain["query"], plain["type"]) == ({}, "application/json")
    assert strict["query"] == {"fieldValidation": "Strict"}
    assert applied["query"] == {"fieldManager": kube_api.FIELD_MANAGER, "force": "true"}
    assert applied["type"] == APPLY_PATCH


class Held:
    """Whether this operator leads."""

    held = False


async def test_an_operator_that_does_not_lead_reads_and_writes_nothing(port: int, tmp_path: Path) -> None:
    leadership = Held()
    config = kubeconfig(tmp_path, f"http://127.0.0.1:{port}")
    api = await Api.connect(kubeconfig=config, leadership=leadership)
    try:
        assert await api.get("/version")
        with pytest.raises(Unavailable, match="POST /made: not sent, because this operator does not hold the lease"):
            await api.request("POST", "/made", {})
        leadership.held = True
        assert await api.request("POST", "/made", {})
    finally:
        await api.close()


class Listener:
    """Notes the requests that it hears of."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, int | None]] = []

    def on_api_request(self, verb: str, resource: str, code: int | None, seconds: float) -> None:
        assert 0.0 <= seconds < 60.0
        self.heard.append((verb, resource, code))


async def test_each_request_and_watch_is_told_with_its_answer(port: int, tmp_path: Path) -> None:
    listener = Listener()
    api = await Api.connect(kubeconfig=kubeconfig(tmp_path, f"http://127.0.0.1:{port}"), listener=listener)
    try:
        await api.get("/api/v1/namespaces/a/pods/digits-w0")
        with pytest.raises(Conflict):
            await api.request("POST", "/codes/409", {})
        assert [event async for event in api.watch("/api/v1/pods", "1", 0)] == []
        with pytest.raises(Unavailable):
            await api.get("/api/v1/namespaces/slow/pods", timeout=0.05)
    finally:
        await api.close()
    assert listener.heard == [
        ("get", "pods", 200),
        ("get", "discovery", 409),
        ("watch", "pods", 200),
        ("list", "pods", None),
    ]
