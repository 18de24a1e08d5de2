"""What the channel refuses, with which code and in which words: one row for each kind of refusal."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import ClientSession, TCPConnector
from aiohttp.test_utils import TestClient, TestServer

from pipetransformer_contract.messages import Heartbeat, Ready, Report
from pipetransformer_contract.wire import Wire
from pipetransformer_operator.channel import app as channel_app
from pipetransformer_operator.channel.app import MAX_BODY_BYTES, Channel
from pipetransformer_operator.channel.authenticator import CannotTell, Identity, TokenTable, Unauthenticated
from pipetransformer_operator.channel.limits.rate import Rate
from pipetransformer_operator.channel.listener import ChannelListener
from pipetransformer_operator.channel.refusal import Refusal
from pipetransformer_operator.kube.trust.tokens import TokenReviewer
from tests.testkit.operator.bounds import message_violations
from tests.testkit.operator.channel import TOKENS, client_of, generation, headers, new_board, report, show

pytestmark = pytest.mark.timeout(60)


@dataclass
class Row:
    """A request and what is answered; a POST where there is a body."""

    kind: Refusal
    text: str
    path: str = "/v1/ready"
    given: dict[str, str] = field(default_factory=headers)
    body: Any = None
    times: int = 1


class Away(TokenTable):
    """Nobody can be asked about tokens that are not known."""

    async def identify(self, token: str) -> Identity:
        raise CannotTell("the API server is away")


class Slow(TokenTable):
    """Knows no token at once, and says nothing of any before `answer`."""

    def __init__(self, tokens: Mapping[str, Identity]) -> None:
        super().__init__(tokens)
        self.answer = asyncio.Event()
        self.reviews = 0
        self._looked_up = dict(tokens)

    def known(self, token: str) -> Identity | None:
        return None

    async def identify(self, token: str) -> Identity:
        self.reviews += 1
        await self.answer.wait()
        if token not in self._looked_up:
            raise Unauthenticated("unknown token")
        return self._looked_up[token]


BURST = 5
READY = {"address": "10.0.0.1:1"}
BEAT = {"layoutGeneration": 1, "step": 1}
DEEP = b'{"address": ' + b"[" * 30000 + b"]" * 30000 + b"}"
OFFER = {"stages": 2, "bytesPerWorker": 1}
WIDTHS = [{"pipelines": 1, "seconds": 0.1}, {"pipelines": 2, "seconds": 0.1}, {"pipelines": 1, "seconds": 0.2}]
OTHER = headers() | {"X-Pipetransformer-Worker": "digits-w1"}
ROWS = [
    Row(Refusal.NO_TOKEN, "a bearer token is required", given={}, body=READY),
    Row(Refusal.NO_TOKEN, "a bearer token is required", given={"Authorization": "Basic eDp5"}, body=READY),
    Row(Refusal.INVALID_TOKEN, "unknown token", given=headers("nonsense"), body=READY),
    Row(Refusal.FOREIGN_NAMESPACE, "namespace kube-system", given=headers("elsewhere"), body=READY),
    Row(Refusal.FOREIGN_WORKER, "belongs to pod digits-w0", given=OTHER, body=READY),
    Row(Refusal.FOREIGN_JOB, "not a worker of job", given=headers("foreign"), body=READY),
    Row(
        Refusal.FOREIGN_JOB,
        "'deleted' is not the UID of the present job",
        path="/v1/report",
        body=report(job_uid="deleted"),
    ),
    Row(Refusal.FOREIGN_JOB, r"'a\nb' is not the UID", path="/v1/report", body=report(job_uid="a\nb")),  # it is logged
    Row(
        Refusal.UNKNOWN_JOB,
        "job default/unheard-of yet",
        given=headers(job="default/unheard-of"),
        body=READY,
    ),
    Row(Refusal.NOT_MEMBER, "not a member", path="/v1/report", given=headers("token-1"), body=report()),
    Row(Refusal.UNPUBLISHED, "the newest is 1", path="/v1/report", body=report(layout_generation=2)),
    Row(Refusal.NOT_DURABLE, "not in the job's status", path="/v1/report", body=report()),
    Row(Refusal.BAD_QUERY, "after: 'x' is not a number", path="/v1/generation?after=x"),
    Row(Refusal.BAD_QUERY, "timeoutSeconds: '-1' is out of range", path="/v1/generation?timeoutSeconds=-1"),
    Row(Refusal.BAD_QUERY, "timeoutSeconds: 'nan' is out of range", path="/v1/generation?timeoutSeconds=nan"),
    Row(Refusal.NO_JSON, "JSON", body=b"{"),
    Row(Refusal.NO_JSON, "JSON", body=b"\xff\xfe"),
    *(
        Row(Refusal.NO_JSON, "JSON", given=headers() | {"Content-Type": f"text/plain; charset={name}"}, body=b"\xff")
        for name in ("undefined", "idna", "hex")
    ),
    Row(Refusal.NO_JSON, "recursion", body=DEEP),
    Row(Refusal.NO_JSON, "cannot be read", given=headers() | {"Content-Encoding": "gzip"}, body=b"garbage"),
    Row(Refusal.TOO_LONG, str(MAX_BODY_BYTES), body=b" " * (MAX_BODY_BYTES + 1)),
    Row(Refusal.DOES_NOT_FIT, "address", body=b"{}"),
    Row(Refusal.DOES_NOT_FIT, "step", path="/v1/report", body=report() | {"step": -1}),
    Row(Refusal.DOES_NOT_FIT, "loss", path="/v1/report", body=report() | {"loss": "NaN"}),
    Row(Refusal.DOES_NOT_FIT, "offers", path="/v1/report", body=report() | {"offers": [{}] * 17}),
    Row(
        Refusal.DOES_NOT_FIT,
        "offers: more than one has stages 2",
        path="/v1/report",
        body=report() | {"offers": [OFFER, OFFER]},
    ),
    Row(
        Refusal.DOES_NOT_FIT,
        "offers.0.stepSeconds: more than one has pipelines 1",
        path="/v1/report",
        body=report() | {"offers": [OFFER | {"stepSeconds": WIDTHS}]},
    ),
    Row(Refusal.DOES_NOT_FIT, "boundary: cannot freeze 20 of 12", path="/v1/report", body=report() | {"boundary": 20}),
    *(
        Row(Refusal.DOES_NOT_FIT, f"address: '{address}' is not HOST:PORT", body={"address": address})
        for address in ("10.0.0.1", "10.0.0.1:", ":29500", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:http")
    ),
    Row(Refusal.TOO_MANY, "asks too often", body=READY, times=BURST + 1),
    Row(Refusal.TOO_MANY, "unknown tokens", given=headers("nonsense"), body=READY, times=BURST + 1),
    Row(Refusal.CANNOT_TELL, "the API server is away", given=headers("unseen"), body=READY),
    Row(Refusal.ENDED, "has ended", path="/v1/generation", given=headers("token-1", job="default/ended")),
    Row(Refusal.ENDED, "has ended", path="/v1/heartbeat", given=headers(job="default/ended"), body=BEAT),
]


@pytest.fixture(autouse=True)
def slow_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """So slow that a slow machine is too quick."""
    for name in ("WORKER_RATE", "BAD_TOKEN_RATE"):
        monkeypatch.setattr(channel_app, name, (0.001, BURST))


def test_each_kind_of_refusal_has_a_row() -> None:
    assert {row.kind for row in ROWS} == set(Refusal)


async def _send(client: TestClient[Any, Any], row: Row) -> Any:
    if row.body is None:
        return await client.get(row.path, headers=row.given)
    form = {"data": row.body} if isinstance(row.body, bytes) else {"json": row.body}
    return await client.post(row.path, headers=row.given, **form)


async def test_bad_tokens_that_come_together_are_as_few_reviews_as_one_after_another() -> None:
    authenticator = Slow(TOKENS)
    async with TestClient(TestServer(Channel({}, authenticator).application())) as client:
        bad = [Row(Refusal.TOO_MANY, "", given=headers(f"bad-{number}"), body=READY) for number in range(3 * BURST)]
        asked = [asyncio.create_task(_send(client, row)) for row in bad]
        refused, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [(await one).status for one in refused] == [429] * len(refused)
        authenticator.answer.set()
        codes = Counter([(await one).status for one in asked])
        assert codes == {401: BURST, 429: 2 * BURST}
        assert authenticator.reviews == BURST


@pytest.mark.parametrize("token", ["token-0", "unseen"])
async def test_only_bad_tokens_are_held_against_an_address(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_app, "WORKER_RATE", (0.001, 10 * BURST))
    authenticator: TokenTable = Away(TOKENS)
    if token in TOKENS:
        authenticator = slow = Slow(TOKENS)
        slow.answer.set()
    async with TestClient(TestServer(Channel({}, authenticator).application())) as client:
        row = Row(Refusal.CANNOT_TELL, "", given=headers(token), body=READY)
        assert {(await _send(client, row)).status for _ in range(3 * BURST)} == {503}


async def test_a_good_token_is_served_although_its_address_shows_bad_ones() -> None:
    board = new_board()
    await show(board, None)
    async with TestClient(
        TestServer(Channel({("default", "digits"): board}, TokenTable(TOKENS)).application())
    ) as client:
        bad = Row(Refusal.TOO_MANY, "", given=headers("nonsense"), body=READY)
        answers = [(await _send(client, bad)).status for _ in range(BURST + 1)]
        assert (answers[0], answers[-1]) == (401, 429)
        assert (await client.post("/v1/ready", json=READY, headers=headers())).status == 204


@pytest.mark.parametrize(
    ("header", "status"), [(b"Authorization: Bearer \xff", 401), (b"X-Pipetransformer-Job: default/\xff", 503)]
)
async def test_a_header_of_any_bytes_is_refused_like_another(header: bytes, status: int) -> None:
    authenticator = TokenReviewer(AsyncMock()) if status == 401 else TokenTable(TOKENS)
    async with TestServer(Channel({}, authenticator).application()) as server:
        assert server.port is not None
        reader, writer = await asyncio.open_connection(server.host, server.port)
        token = next(token for token, identity in TOKENS.items() if identity.namespace == "default").encode()
        writer.write(b"GET /v1/generation HTTP/1.0\r\nHost: x\r\n%b\r\n" % header)
        writer.write(b"Authorization: Bearer %b\r\n\r\n" % token)
        assert f" {status} ".encode() in await reader.readline()
        writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_app, "BODY_SECONDS", 0.05)
    board = new_board()
    await show(board, None)
    async with client_of(board) as client:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        given = "".join(f"{name}: {value}\r\n" for name, value in headers().items())
        writer.write(f"POST /v1/ready HTTP/1.0\r\nContent-Length: 9\r\n{given}\r\n{{".encode())
        assert b" 400 " in await reader.readline()
        await reader.readuntil(b"the body did not arrive within 0.05 s")
        writer.close()


async def test_a_job_that_was_not_looked_at_yet_is_asked_to_come_again() -> None:
    channel = Channel({("default", "digits"): new_board()}, TokenTable(TOKENS))
    async with TestClient(TestServer(channel.application())) as client:
        assert (await client.post("/v1/ready", json=READY, headers=headers())).status == 503


async def test_a_waiting_poll_learns_that_the_job_ends() -> None:
    board = new_board()
    await show(board, None)
    async with TestClient(
        TestServer(Channel({("default", "digits"): board}, TokenTable(TOKENS)).application())
    ) as client:
        path = "/v1/generation?after=0&timeoutSeconds=10"
        poll = asyncio.create_task(client.get(path, headers=headers()).__aenter__())
        await show(board, None, ended=True)
        assert (await poll).status == 410


async def test_no_poll_waits_longer_than_the_channel_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_app, "MAX_POLL_SECONDS", 0.01)
    board = new_board()
    await show(board, None)
    async with client_of(board) as client:
        async with asyncio.timeout(5):
            response = await client.get("/v1/generation?after=0&timeoutSeconds=1e9", headers=headers())
        assert response.status == 204


async def test_past_the_bound_of_polls_workers_retry_and_reports_are_taken() -> None:
    board = new_board()
    await show(board, generation(1, "digits-w1"))
    channel = Channel({("default", "digits"): board}, TokenTable(TOKENS), most_polls=1)
    async with TestClient(TestServer(channel.application())) as client:

        async def poll(after: int, token: str = "token-0") -> int:
            path = f"/v1/generation?after={after}&timeoutSeconds=10"
            async with client.get(path, headers=headers(token)) as response:
                assert response.headers.get("Retry-After") == ("20" if response.status == 429 else None)
                return response.status

        waiting = {asyncio.create_task(poll(1)) for _ in range(2)}
        refused, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [one.result() for one in refused] == [429]
        assert await poll(0, "token-1") == 200, "it need not wait"
        members = {asyncio.create_task(poll(1, "token-1")) for _ in range(2)}
        refused, members = await asyncio.wait(members, return_when=asyncio.FIRST_COMPLETED)
        assert [one.result() for one in refused] == [429], "members have some places more, and no more than those"
        assert await poll(0, "token-1") == 200, "it still need not wait"
        assert (await client.post("/v1/heartbeat", json=BEAT, headers=headers())).status == 200
        await show(board, generation(2, "digits-w0", "digits-w1"))
        assert [await one for one in [*waiting, *members]] == [200, 200]
        assert await poll(1) == 200


async def test_a_leader_reports_an_older_generation_and_a_model_that_is_frozen_whole() -> None:
    board = new_board()
    await show(board, generation(2, "digits-w0"))
    await board.settle(1)
    async with client_of(board) as client:
        body = report(layout_generation=1, boundary=12, num_layers=12)
        assert (await client.post("/v1/report", json=body, headers=headers())).status == 200


async def test_what_one_worker_or_one_address_does_too_often_is_held_against_no_other() -> None:
    board = new_board()
    await show(board, None)
    channel = Channel({("default", "digits"): board}, TokenTable(TOKENS))
    async with TestClient(TestServer(channel.application())) as client:

        async def ask(token: str) -> int:
            return (await client.post("/v1/ready", json=READY, headers=headers(token))).status

        assert [await ask("token-0") for _ in range(BURST + 1)] == [204] * BURST + [429]
        assert await ask("token-1") == 204
        assert [await ask("nonsense") for _ in range(BURST + 1)] == [401] * BURST + [429]
        async with ClientSession(connector=TCPConnector(local_addr=("127.0.0.2", 0))) as other:
            url = client.make_url("/v1/ready")
            assert (await other.post(url, json=READY, headers=headers("nonsense"))).status == 401


async def test_each_request_is_counted_by_its_path_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[str, int]] = []

    class Counting(ChannelListener):
        def on_request(self, path: str, code: int, seconds: float) -> None:
            assert 0 <= seconds < 60
            counted.append((path, code))

    board, ended = new_board(), new_board()
    await show(board, None)
    await show(ended, None, ended=True)
    boards = {("default", "digits"): board, ("default", "ended"): ended}
    async with TestClient(TestServer(Channel(boards, TokenTable(TOKENS), Counting()).application())) as client:
        await client.post("/v1/ready", json=READY, headers=headers())
        await client.post("/v1/ready", json=READY)
        await client.post("/v1/heartbeat", json=BEAT, headers=headers(job="default/ended"))
        await client.get("/v2/ready")
        monkeypatch.setattr(board, "put_ready", None)
        await client.post("/v1/ready", json=READY, headers=headers())
    assert counted == [
        ("/v1/ready", 204),
        ("/v1/ready", 401),
        ("/v1/heartbeat", 410),
        ("unknown", 404),
        ("/v1/ready", 500),
    ]


async def test_a_leader_may_still_report_what_it_leaves_when_the_job_has_ended() -> None:
    board = new_board()
    await show(board, generation(1, "digits-w0"), ended=True)
    await board.settle(1)
    async with client_of(board) as client:
        assert (await client.post("/v1/heartbeat", json=BEAT, headers=headers())).status == 410
        assert (await client.post("/v1/report", json=report(step=7), headers=headers())).status == 200
    assert board.report is not None and board.report.step == 7


def test_a_key_may_do_a_burst_and_then_its_rate() -> None:
    now = 0.0
    rate = Rate(2.0, 3, clock=lambda: now)
    assert [rate.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    assert rate.take("b") == 0
    now = 0.5
    assert [rate.take("a"), rate.take("a")] == [0, 0.5]
    now = 100.0
    assert [rate.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    rate.undo("a")
    assert [rate.take("a"), rate.take("a")] == [0, 0.5]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind.label}: {row.text}")
async def test_a_refusal_has_its_code_is_counted_and_never_logs_the_token(
    row: Row, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel_app, "DURABLE_SECONDS", 0.01)
    board, ended = new_board(), new_board()
    await show(board, generation(1, "digits-w0"))
    await show(ended, None, ended=True)
    counted: Counter[Refusal] = Counter()
    authenticator = (Away if row.kind is Refusal.CANNOT_TELL else TokenTable)(TOKENS)
    boards = {("default", "digits"): board, ("default", "ended"): ended}
    listener = ChannelListener()
    monkeypatch.setattr(listener, "on_refusal", lambda kind: counted.update([kind]))
    channel = Channel(boards, authenticator, listener)
    async with TestClient(TestServer(channel.application())) as client:
        for _ in range(row.times):
            response = await _send(client, row)
        text = await response.text()
    assert (response.status, row.text in text) == (row.kind.code, True), text
    assert counted[row.kind] >= 1
    assert ("Retry-After" in response.headers) == (row.kind is Refusal.TOO_MANY)
    logged = caplog.text
    if row.kind.code in (401, 403, 429):
        assert row.text in logged
    assert "nonsense" not in logged and "token-0" not in logged
    assert not board.ready or row.kind is Refusal.TOO_MANY


MESSAGES: list[tuple[str, type[Wire], dict[str, Any]]] = [
    ("/v1/ready", Ready, READY),
    ("/v1/heartbeat", Heartbeat, BEAT),
    ("/v1/report", Report, report()),
]


@pytest.mark.parametrize(("path", "kind", "message"), MESSAGES, ids=[path for path, _, _ in MESSAGES])
async def test_each_bound_of_each_message_is_kept(
    path: str, kind: type[Wire], message: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_app, "WORKER_RATE", (1e6, 10**6))
    board = new_board()
    await show(board, generation(1, "digits-w0"))
    rows = list(message_violations(kind, message))
    channel = Channel({("default", "digits"): board}, TokenTable(TOKENS))
    async with TestClient(TestServer(channel.application())) as client:
        for row in rows:
            response = await client.post(path, headers=headers(), json=row.manifest)
            assert response.status == Refusal.DOES_NOT_FIT.code, row
            assert (await response.text()).startswith(row.path), row
    assert len(rows) > len(kind.model_fields)


def test_where_many_keys_are_known_only_those_that_may_do_a_burst_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipetransformer_operator.channel.limits.rate.MAX_KEYS", 2)
    now = 0.0
    rate = Rate(1.0, 1, clock=lambda: now)
    assert rate.take("a") == 0
    now = 0.5
    assert rate.take("b") == 0
    now = 1.0
    assert rate.take("c") == 0
    assert [rate.wait(key) for key in ("a", "b", "c")] == [0, 0.5, 1.0]
