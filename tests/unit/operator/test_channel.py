"""The channel: who is told what, and when a report is acknowledged. What it refuses is in test_channel_refusals."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pipetransformer_contract.messages import Heartbeat, Member, Report, ResizeReason
from pipetransformer_operator.api.status import PublishedPlan
from pipetransformer_operator.channel import board as channel_board
from pipetransformer_operator.channel.app import Channel
from pipetransformer_operator.channel.authenticator import Identity, TokenTable
from pipetransformer_operator.channel.board import MAX_POLLS, Board, Reporter
from pipetransformer_operator.channel.pulse import Pulse
from pipetransformer_operator.plan import Worker

pytestmark = pytest.mark.timeout(60)
WORKERS = [Worker(0, "digits-w0", "uid-0"), Worker(1, "digits-w1", "uid-1")]
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
    await board.show(published, job_uid="job", ended=ended)


def new_board() -> Board:
    return Board(lambda: None, lambda: datetime.now(UTC), Pulse(), lambda: WORKERS)


@asynccontextmanager
async def client_of(board: Board, authenticator: Any = None) -> AsyncIterator[TestClient[Any, Any]]:
    channel = Channel({("default", "digits"): board}, authenticator or TokenTable(TOKENS))
    async with TestClient(TestServer(channel.application())) as client:
        yield client


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


async def test_of_one_worker_few_polls_wait_and_the_newest_are_kept() -> None:
    board = new_board()
    await show(board, None)
    first, second = (Reporter(worker.name, worker.uid) for worker in WORKERS)

    def poll(reporter: Reporter) -> asyncio.Task[Any]:
        return asyncio.create_task(board.generation_after(reporter, 0, timeout=600))

    other = poll(second)
    polls = [poll(first) for _ in range(MAX_POLLS + 2)]
    await asyncio.wait(polls[:2])
    done, waiting = await asyncio.wait(polls, timeout=0.1)
    assert done == set(polls[:2]) and all(one.result() is None for one in done)
    await show(board, plan(1, "digits-w0", "digits-w1"))
    generations = await asyncio.gather(other, *waiting)
    assert [one.layout_generation for one in generations] == [1] * (1 + MAX_POLLS)


async def test_a_poll_wakes_nobody_else_and_those_that_are_over_count_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    board, looked = new_board(), list[str]()
    await show(board, plan(1, "digits-w0"))
    monkeypatch.setattr(channel_board, "_names", lambda _, uid: looked.append(uid))
    first, second = (Reporter(worker.name, worker.uid) for worker in WORKERS)
    waiting = asyncio.create_task(board.generation_after(first, 0, timeout=600))
    for _ in range(2 * MAX_POLLS):
        assert await board.generation_after(second, 0, timeout=0) is None
    kept = [asyncio.create_task(board.generation_after(second, 0, timeout=600)) for _ in range(MAX_POLLS)]
    done, _ = await asyncio.wait([waiting, *kept], timeout=0.1)
    assert not done
    assert looked.count(first.uid) == 1, "it looked when it came, and was woken by nobody"
    for poll in (waiting, *kept):
        poll.cancel()


async def test_a_report_is_acknowledged_only_when_the_status_holds_it() -> None:
    arrived = asyncio.Event()
    board = Board(arrived.set, lambda: datetime.now(UTC), Pulse(), lambda: WORKERS)
    await show(board, plan(1, "digits-w0"))
    async with client_of(board) as client:
        request = asyncio.create_task(client.post("/v1/report", json=report(), headers=headers()).__aenter__())
        await arrived.wait()
        assert not request.done()
        await board.settle(board.arrived)
        response = await request
        assert (response.status, await response.json()) == (200, {"layoutGeneration": 1, "nextSeconds": 5.0})


async def test_members_that_are_told_to_stop_still_report_and_say_why_their_checkpoint_is_late() -> None:
    board = new_board()
    await board.show(plan(1, "digits-w0"), job_uid="job", ended=False, stop=True)
    async with client_of(board) as client:
        beat = {"layoutGeneration": 1, "step": 3, "unsaved": "No space left on device"}
        response = await client.post("/v1/heartbeat", json=beat, headers=headers())
        assert (await response.json())["stop"] is True
        assert board.beats["uid-0"].unsaved == "No space left on device"


async def test_a_worker_created_since_the_last_turn_is_served_at_once() -> None:
    workers: list[Worker] = []
    board = Board(lambda: None, lambda: datetime.now(UTC), Pulse(), lambda: workers)
    await show(board, None)
    async with client_of(board) as client:
        ready = {"address": "127.0.0.1:1"}
        assert (await client.post("/v1/ready", json=ready, headers=headers())).status == 403
        workers += WORKERS[:1]
        assert (await client.post("/v1/ready", json=ready, headers=headers())).status == 204
        assert (await client.post("/v1/ready", json=ready, headers=headers("token-1"))).status == 403
    await show(board, None)
    assert list(board.ready) == ["uid-0"]


async def test_a_replayed_report_does_not_replace_a_newer_one() -> None:
    board = new_board()
    await show(board, plan(1, "digits-w0"))
    await board.settle(2)
    async with client_of(board) as client:
        for step in (7, 3):
            assert (await client.post("/v1/report", json=report(step=step), headers=headers())).status == 200
        assert board.report is not None and board.report.step == 7


async def test_a_broken_connection_is_believed_only_for_the_present_generation() -> None:
    board = new_board()
    await show(board, plan(1, "digits-w0", "digits-w1"))
    async with client_of(board) as client:
        beat = {"layoutGeneration": 1, "step": 3, "lostPeers": ["digits-w1"], "because": "it closed"}
        response = await client.post("/v1/heartbeat", json=beat, headers=headers())
        assert await response.json() == {"layoutGeneration": 1, "nextSeconds": 2.0, "stop": False}
        assert board.lost_peers == {"digits-w1"}
        assert board.beats["uid-0"].because == "it closed"
        await show(board, plan(2, "digits-w0"))
        assert not board.lost_peers


async def test_silence_of_all_that_ends_says_nothing_about_those_who_have_not_spoken_yet() -> None:
    now = start = datetime(2026, 1, 1, tzinfo=UTC)
    board = Board(lambda: None, lambda: now, Pulse(), lambda: WORKERS)
    reporters = [Reporter(worker.name, worker.uid) for worker in WORKERS]
    for second, speaker, since in ((0, 0, 0), (9, 1, 0), (19, 0, 0), (30, 0, 30), (31, 1, 30)):
        now = start + timedelta(seconds=second)
        board.put_heartbeat(reporters[speaker], Heartbeat(layout_generation=1, step=1))
        assert board.since == start + timedelta(seconds=since), second


async def test_what_was_said_before_the_clock_was_set_back_is_not_said_in_the_future() -> None:
    now = start = datetime(2026, 1, 1, tzinfo=UTC)
    board = Board(lambda: None, lambda: now, Pulse(), lambda: WORKERS)
    waiting = Heartbeat(layout_generation=1, step=1, waiting_after=1)
    for worker in WORKERS:
        board.put_heartbeat(Reporter(worker.name, worker.uid), waiting)
    now = start - timedelta(hours=1)
    board.put_heartbeat(Reporter(WORKERS[0].name, WORKERS[0].uid), waiting)
    assert board.since == now
    assert set(board.heard.values()) == {now}
    assert {(beat.time, beat.waiting_since) for beat in board.beats.values()} == {(now, now)}


async def test_a_worker_in_no_group_says_since_when_until_it_is_in_one_again() -> None:
    woken: list[int] = []
    start = datetime(2026, 1, 1, tzinfo=UTC)
    clock = iter(start + timedelta(seconds=second) for second in range(-1, 100))
    board = Board(lambda: woken.append(1), lambda: next(clock), Pulse(), lambda: WORKERS)
    await show(board, plan(1, "digits-w0", "digits-w1"))
    reporter = Reporter("digits-w0", "uid-0")
    said = []
    for generation, waiting_after in ((1, None), (1, 1), (1, 1), (1, 2), (3, None)):
        board.put_heartbeat(reporter, Heartbeat(layout_generation=generation, step=1, waiting_after=waiting_after))
        beat = board.beats["uid-0"]
        since = beat.waiting_since and (beat.waiting_since - start).seconds
        said.append((beat.layout_generation, beat.waiting_after, since))
    assert said == [(1, None, None), (1, 1, 1), (1, 1, 1), (1, 2, 3), (3, None, None)]
    assert len(woken) == 2, "each new wait wakes the loop"
