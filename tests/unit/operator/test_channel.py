"""The channel: who may say what, what is refused and in which words, and when a report is acknowledged."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import ClientConnectorCertificateError, ClientSession
from aiohttp.test_utils import TestClient, TestServer

from pipetransformer_contract.messages import Member, Report, ResizeReason
from pipetransformer_operator.api.status import PublishedPlan
from pipetransformer_operator.channel import app as channel_app
from pipetransformer_operator.channel.app import MAX_BODY_BYTES, Channel
from pipetransformer_operator.channel.authenticator import CannotTell, Identity, TokenTable
from pipetransformer_operator.channel.board import Board
from pipetransformer_operator.channel.certificate import new_authority, server_context

pytestmark = pytest.mark.timeout(20)
WORKERS = [("digits-w0", "uid-0"), ("digits-w1", "uid-1")]
TOKENS = {
    "token-0": Identity("default", "digits-w0", "uid-0"),
    "token-1": Identity("default", "digits-w1", "uid-1"),
    "foreign": Identity("default", "other-w0", "uid-9"),
    "elsewhere": Identity("kube-system", "digits-w0", "uid-0"),
}


def headers(token: str = "token-0", job: str = "default/digits") -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "X-Pipetransformer-Job": job}


def plan(number: int, *names: str) -> PublishedPlan:
    members = [Member(name=name, uid=name.replace("digits-w", "uid-"), address="127.0.0.1:1") for name in names]
    return PublishedPlan(
        layout_generation=number,
        stages=len(members),
        pipelines=1,
        members=members,
        leader=members[0].name,
        nonce="n",
        reason=ResizeReason.START,
    )


def report(**changes: Any) -> dict[str, object]:
    values: dict[str, Any] = {
        "job_uid": "job",
        "layout_generation": 1,
        "step": 1,
        "boundary": 0,
        "num_layers": 12,
        "bytes_budget": 0,
    }
    return Report(**(values | changes)).to_wire()


async def show(board: Board, published: PublishedPlan | None, *, ended: bool = False) -> None:
    await board.show(published, job_uid="job", workers=WORKERS, ended=ended)


def new_board() -> Board:
    return Board(lambda: None, lambda: datetime.now(UTC))


@asynccontextmanager
async def client_of(board: Board, authenticator: Any = None) -> AsyncIterator[TestClient[Any, Any]]:
    channel = Channel({("default", "digits"): board}, authenticator or TokenTable(TOKENS))
    async with TestClient(TestServer(channel.application())) as client:
        yield client


@pytest.mark.parametrize(
    ("given", "status", "text"),
    [
        ({}, 401, "bearer"),
        (headers("nonsense"), 401, "unknown token"),
        (headers("foreign"), 403, "no worker of job"),
        (headers("elsewhere"), 403, "namespace kube-system"),
        (headers(job="default/unheard-of"), 503, "not known here"),
        (headers() | {"X-Pipetransformer-Worker": "digits-w1"}, 403, "belongs to pod digits-w0"),
    ],
)
async def test_only_the_jobs_own_workers_are_heard(given: dict[str, str], status: int, text: str) -> None:
    board = new_board()
    await show(board, None)
    async with client_of(board) as client:
        response = await client.post("/v1/ready", json={"address": "10.0.0.1:1"}, headers=given)
        assert response.status == status
        assert text in await response.text()
        assert not board.ready


async def test_a_job_that_was_not_looked_at_yet_is_asked_to_come_again() -> None:
    async with client_of(new_board()) as client:
        response = await client.post("/v1/ready", json={"address": "10.0.0.1:1"}, headers=headers())
        assert response.status == 503


async def test_an_unknown_token_is_not_refused_while_nobody_can_be_asked() -> None:
    class Away:
        async def identify(self, token: str) -> Identity:
            raise CannotTell("the API server is away")

    async with client_of(new_board(), Away()) as client:
        response = await client.post("/v1/ready", json={"address": "10.0.0.1:1"}, headers=headers())
        assert response.status == 503


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{", 400, "JSON"),
        (b"{}", 422, "address"),
        (b" " * (MAX_BODY_BYTES + 1), 413, ""),
    ],
)
async def test_a_body_that_does_not_fit_is_refused_with_the_field(body: bytes, status: int, text: str) -> None:
    board = new_board()
    await show(board, None)
    async with client_of(board) as client:
        response = await client.post("/v1/ready", data=body, headers=headers())
        assert response.status == status
        assert text in await response.text()


async def test_a_long_poll_is_answered_when_a_generation_that_names_the_worker_is_shown() -> None:
    board = new_board()
    await show(board, None)
    async with client_of(board) as client:
        path = "/v1/generation?after=0&timeoutSeconds=10"
        poll = asyncio.create_task(client.get(path, headers=headers("token-1")).__aenter__())
        await show(board, plan(1, "digits-w0"))
        await show(board, plan(2, "digits-w0", "digits-w1"))
        response = await poll
        assert response.status == 200
        assert (await response.json())["layoutGeneration"] == 2
        assert (await client.get("/v1/generation?after=2&timeoutSeconds=0", headers=headers())).status == 204


async def test_workers_of_an_ended_job_are_told_to_go() -> None:
    board = new_board()
    await show(board, None)
    async with client_of(board) as client:
        path = "/v1/generation?after=0&timeoutSeconds=10"
        poll = asyncio.create_task(client.get(path, headers=headers()).__aenter__())
        await show(board, None, ended=True)
        assert (await poll).status == 410


async def test_a_report_is_acknowledged_only_when_the_status_holds_it() -> None:
    arrived = asyncio.Event()
    board = Board(arrived.set, lambda: datetime.now(UTC))
    await show(board, plan(1, "digits-w0"))
    async with client_of(board) as client:
        request = asyncio.create_task(client.post("/v1/report", json=report(), headers=headers()).__aenter__())
        await arrived.wait()
        assert not request.done()
        await board.settle(board.arrived)
        response = await request
        assert (response.status, await response.json()) == (200, {"layoutGeneration": 1})


async def test_a_report_that_does_not_become_durable_is_to_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_app, "DURABLE_SECONDS", 0.01)
    board = new_board()
    await show(board, plan(1, "digits-w0"))
    async with client_of(board) as client:
        assert (await client.post("/v1/report", json=report(), headers=headers())).status == 503


async def test_a_replayed_report_does_not_replace_a_newer_one() -> None:
    board = new_board()
    await show(board, plan(1, "digits-w0"))
    await board.settle(2)
    async with client_of(board) as client:
        for step in (7, 3):
            assert (await client.post("/v1/report", json=report(step=step), headers=headers())).status == 200
        assert board.report is not None and board.report.step == 7


async def test_reports_of_strangers_and_of_unpublished_generations_are_refused() -> None:
    board = new_board()
    await show(board, plan(1, "digits-w0"))
    async with client_of(board) as client:
        assert (await client.post("/v1/report", json=report(), headers=headers("token-1"))).status == 403
        assert (await client.post("/v1/report", json=report(layout_generation=2), headers=headers())).status == 409


async def test_a_broken_connection_is_believed_only_for_the_present_generation() -> None:
    board = new_board()
    await show(board, plan(1, "digits-w0", "digits-w1"))
    async with client_of(board) as client:
        beat = {"layoutGeneration": 1, "step": 3, "lostPeers": ["digits-w1"]}
        response = await client.post("/v1/heartbeat", json=beat, headers=headers())
        assert await response.json() == {"layoutGeneration": 1}
        assert board.lost_peers == {"digits-w1"}
        await show(board, plan(2, "digits-w0"))
        assert not board.lost_peers


async def test_the_servers_certificate_is_trusted_by_the_authority_alone(tmp_path: Any) -> None:

    authority = new_authority()
    board = new_board()
    await show(board, None)
    app = Channel({("default", "digits"): board}, TokenTable(TOKENS)).application()
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=server_context(authority, ["127.0.0.1"]))
    trusted = ssl.create_default_context(cadata=authority.certificate.decode())
    stranger = ssl.create_default_context(cadata=new_authority().certificate.decode())
    async with ClientSession() as session:
        url = server.make_url("/v1/ready")
        async with session.post(url, json={"address": "10.0.0.1:1"}, headers=headers(), ssl=trusted) as response:
            assert response.status == 204
        with pytest.raises(ClientConnectorCertificateError):
            await session.post(url, json={}, headers=headers(), ssl=stranger)
    await server.close()
