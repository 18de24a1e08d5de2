"""The channel: who is told what, and when a report is acknowledged. What it refuses is in test_channel_refusals."""

import asyncio
import contextlib
import itertools
import socket
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pipetransformer_contract.messages import Generation, GenerationNotice, Heartbeat, Ready, Report
from pipetransformer_operator.channel import announcement as channel_announcement
from pipetransformer_operator.channel import app as channel_app
from pipetransformer_operator.channel.announcement import Announcement
from pipetransformer_operator.channel.authenticator import Identity
from pipetransformer_operator.channel.board import LOOK_PAUSE_FACTOR, MAX_POLLS, TOLD_AT_ONCE, Board, Ended
from pipetransformer_operator.channel.limits.pulse import Pulse
from pipetransformer_operator.clocks import utc_now
from pipetransformer_operator.plan import Worker
from tests.testkit.operator.channel import WORKERS, Loop, client_of, generation, headers, new_board, report, show

pytestmark = pytest.mark.timeout(60)


async def test_a_poll_is_answered_once_a_generation_names_the_worker() -> None:
    board = new_board()
    await show(board, None)
    async with client_of(board) as client:
        path = "/v1/generation?after=0&timeoutSeconds=10"
        poll = asyncio.create_task(client.get(path, headers=headers("token-1")).__aenter__())
        await show(board, generation(1, "digits-w0"))
        await show(board, generation(2, "digits-w0", "digits-w1"))
        response = await poll
        assert response.status == 200
        assert (await response.json())["layoutGeneration"] == 2
        assert (await client.get("/v1/generation?after=2&timeoutSeconds=0", headers=headers())).status == 204


async def test_of_one_worker_few_polls_wait_and_the_newest_are_kept() -> None:
    board = new_board()
    await show(board, None)
    first, second = (Identity("default", worker.name, worker.uid) for worker in WORKERS)

    def poll(sender: Identity) -> asyncio.Task[Any]:
        return asyncio.create_task(board.generation_after(sender, 0, timeout=600))

    other = poll(second)
    polls = [poll(first) for _ in range(MAX_POLLS + 2)]
    await asyncio.wait(polls[:2])
    done, waiting = await asyncio.wait(polls, timeout=0.1)
    assert done == set(polls[:2]) and all(one.result() is None for one in done)
    await show(board, generation(1, "digits-w0", "digits-w1"))
    generations = await asyncio.gather(other, *waiting)
    assert [one.generation.layout_generation for one in generations] == [1] * (1 + MAX_POLLS)


async def test_a_poll_wakes_no_other_and_those_that_are_over_count_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    board, looked = new_board(), list[str]()
    await show(board, generation(1, "digits-w0"))
    has_news = Board._has_news

    def look(board: Board, sender: Identity, after: int) -> bool:
        looked.append(sender.uid)
        return has_news(board, sender, after)

    monkeypatch.setattr(Board, "_has_news", look)
    first, second = (Identity("default", worker.name, worker.uid) for worker in WORKERS)
    waiting = asyncio.create_task(board.generation_after(first, 1, timeout=600))
    for _ in range(2 * MAX_POLLS):
        assert await board.generation_after(second, 0, timeout=0) is None
    kept = [asyncio.create_task(board.generation_after(second, 0, timeout=600)) for _ in range(MAX_POLLS)]
    await board.settle(1)  # a report became durable
    await show(board, generation(2, "digits-w1"))
    done, _ = await asyncio.wait([waiting, *kept], timeout=0.1)
    assert done == set(kept)
    assert looked.count(first.uid) == 1, "it looked when it came, and nothing woke it"
    waiting.cancel()


async def test_a_worker_gets_all_members_only_if_it_asks() -> None:
    board = new_board()
    await show(board, published := generation(3, "digits-w0", "digits-w1"))
    async with client_of(board) as client:

        async def ask(more: str, **given: str) -> Any:
            path = f"/v1/generation?after=2&timeoutSeconds=0{more}"
            return await client.get(path, headers=headers("token-1") | given)

        notice = GenerationNotice.model_validate(await (await ask("")).json())
        assert notice == published.notice()
        assert (notice.job_uid, notice.layout_generation, notice.nonce) == ("job", 3, "n")
        for encoding in ("gzip", "identity"):
            whole = await ask("&members=true", **{"Accept-Encoding": encoding})
            assert (whole.headers.get("Content-Encoding") == "gzip") is (encoding == "gzip")
            assert Generation.model_validate(await whole.json()) == published


async def test_a_worker_that_does_not_read_the_members_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_app, "WHOLE_SECONDS", 0.2)
    monkeypatch.setattr(channel_announcement, "WHOLES_AT_ONCE", 1)
    board = new_board()
    await show(board, generation(1, "digits-w0", "digits-w1"))
    monkeypatch.setattr(Announcement, "whole", b"x" * 2**24)  # more than the kernel keeps for a reader
    path = "/v1/generation?after=0&timeoutSeconds=0&members=true"
    given = "".join(f"{name}: {value}\r\n" for name, value in headers().items())
    async with client_of(board) as client:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((client.host, client.port))
            slow.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{given}\r\n".encode())
            other = await client.get(path, headers=headers("token-1"))
            assert len(await other.read()) == 2**24
            slow.settimeout(10)
            assert await asyncio.to_thread(_length_of_all, slow) < 2**24


def _length_of_all(connection: socket.socket) -> int:
    """How many bytes come until the connection ends."""
    length = 0
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            length += len(part)
    return length


class Crowd:
    """So many workers of one job that wait for generation 1, and what each was told."""

    def __init__(self, workers: int = 2 * TOLD_AT_ONCE + 1) -> None:
        self.names = [f"digits-w{number}" for number in range(workers)]
        pods = [Worker(number, name, name.replace("digits-w", "uid-")) for number, name in enumerate(self.names)]
        self.board = new_board(Loop(pods))
        self.told: list[int] = []
        self.polls = [asyncio.create_task(self._poll(Identity("default", pod.name, pod.uid))) for pod in pods]

    async def _poll(self, sender: Identity) -> None:
        announced = await self.board.generation_after(sender, 0, timeout=600)
        assert announced is not None
        self.told.append(announced.generation.layout_generation)

    async def until_waiting(self) -> None:
        """All polls wait."""
        await asyncio.sleep(0)

    async def until_told(self) -> None:
        """All polls are answered."""
        await asyncio.gather(*self.polls)


async def test_polls_are_answered_in_batches_that_leave_the_event_loop_free() -> None:
    crowd = Crowd()
    await crowd.until_waiting()
    showing = asyncio.create_task(show(crowd.board, generation(1, *crowd.names)))
    told = [0]
    while not showing.done():
        await asyncio.sleep(0)
        told.append(len(crowd.told))
    await crowd.until_told()
    assert max(after - before for before, after in itertools.pairwise(told)) <= TOLD_AT_ONCE


async def test_a_superseded_generation_reaches_no_further_polls() -> None:
    crowd = Crowd()
    await crowd.until_waiting()
    first = asyncio.create_task(show(crowd.board, generation(1, *crowd.names)))
    while len(crowd.told) < TOLD_AT_ONCE:  # noqa: ASYNC110 - each turn of the loop counts
        await asyncio.sleep(0)
    await show(crowd.board, generation(2, *crowd.names[:-1]))
    await first
    assert crowd.told == [1] * TOLD_AT_ONCE + [2] * TOLD_AT_ONCE
    await show(crowd.board, generation(3, *crowd.names))
    await crowd.until_told()
    assert crowd.told[-1] == 3, "the last one was not named, and went on waiting"


async def test_the_end_of_a_job_is_told_to_all_who_wait_named_or_not() -> None:
    crowd = Crowd()
    await crowd.until_waiting()
    await show(crowd.board, generation(1, "digits-w0"))
    await show(crowd.board, generation(1, "digits-w0"), ended=True)
    ends = await asyncio.gather(*crowd.polls, return_exceptions=True)
    assert crowd.told == [1]
    assert [type(end) for end in ends[1:]] == [Ended] * (len(crowd.names) - 1)


async def test_a_report_is_acknowledged_only_when_the_status_holds_it() -> None:
    arrived = asyncio.Event()

    class Waiting(Loop):
        def wake(self) -> None:
            arrived.set()

    board = new_board(Waiting())
    await show(board, generation(1, "digits-w0"))
    async with client_of(board) as client:
        request = asyncio.create_task(client.post("/v1/report", json=report(), headers=headers()).__aenter__())
        await arrived.wait()
        assert not request.done()
        await board.settle(board.arrived)
        response = await request
        assert (response.status, await response.json()) == (
            200,
            {"layoutGeneration": 1, "nextSeconds": 5.0, "checkpointRequest": ""},
        )


async def test_a_report_during_a_status_write_waits_for_the_next_write() -> None:
    board, worker = new_board(), Identity("default", "digits-w0", "uid-0")
    await show(board, generation(1, "digits-w0"))
    first, second = (
        asyncio.create_task(board.put_report(worker, Report.model_validate(report(step=step)), timeout=30))
        for step in (1, 2)
    )
    await asyncio.sleep(0)
    assert board.arrived == 2

    await board.settle(1)
    await first
    for _ in range(10):
        await asyncio.sleep(0)
    assert not second.done()

    await board.settle(2)
    await second


async def test_workers_are_told_the_pace_that_all_workers_and_jobs_allow() -> None:
    pulse = Pulse()
    board = Board(Loop(), utc_now, pulse)
    pulse.add(workers=1000, jobs=200)
    await show(board, generation(1, "digits-w0"))
    await board.settle(1)
    async with client_of(board) as client:
        beat = await client.post("/v1/heartbeat", json={"layoutGeneration": 1, "step": 3}, headers=headers())
        assert (await beat.json())["nextSeconds"] == pulse.beat_seconds > 20
        told = await client.post("/v1/report", json=report(), headers=headers())
        assert (await told.json())["nextSeconds"] == pulse.report_seconds > 20


async def test_stopping_members_say_why_their_checkpoint_is_late() -> None:
    board = new_board()
    await board.show(generation(1, "digits-w0"), ended=False, stop=True)
    async with client_of(board) as client:
        beat = {"layoutGeneration": 1, "step": 3, "unsaved": "No space left on device"}
        response = await client.post("/v1/heartbeat", json=beat, headers=headers())
        assert (await response.json())["stop"] is True
        assert board.beats["uid-0"].unsaved == "No space left on device"


async def test_what_is_said_of_the_storage_wakes_the_loop_when_it_changes() -> None:
    loop = Loop()
    board, woken = new_board(loop), []
    for unsaved in ("", "no space", "no space", ""):
        said = Heartbeat(layout_generation=1, unsaved=unsaved)
        board.put_heartbeat(Identity("default", "digits-w0", "uid-0"), said)
        woken.append(loop.woken)
    assert woken == [0, 1, 1, 2]


async def test_answers_to_heartbeats_and_reports_name_the_checkpoint_that_is_asked_for() -> None:
    board = new_board()
    await board.show(generation(1, "digits-w0"), ended=False, checkpoint_request="one")
    await board.settle(1)
    async with client_of(board) as client:
        for path, body in (("heartbeat", {"layoutGeneration": 1, "step": 3}), ("report", report(step=3))):
            response = await client.post(f"/v1/{path}", json=body, headers=headers())
            assert (await response.json())["checkpointRequest"] == "one"
        await board.show(generation(1, "digits-w0"), ended=False)
        assert board.checkpoint_request == ""


async def test_a_worker_that_is_new_since_the_turn_began_is_not_forgotten_at_its_end() -> None:
    loop = Loop([])
    board, sender = new_board(loop), Identity("default", "digits-w0", "uid-0")
    board.learn(loop.workers())
    loop.pods = [Worker(0, "digits-w0", "uid-0")]
    assert board.knows(sender)
    board.put_ready(sender, Ready(address="10.0.0.1:29500"))
    await board.show(None, ended=False)
    assert "uid-0" in board.ready


async def test_a_worker_created_since_the_last_turn_is_served_at_once() -> None:
    workers: list[Worker] = []
    board = new_board(Loop(workers))
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
    await show(board, generation(1, "digits-w0"))
    await board.settle(2)
    async with client_of(board) as client:
        for step in (7, 3):
            assert (await client.post("/v1/report", json=report(step=step), headers=headers())).status == 200
        assert board.report is not None and board.report.step == 7


async def test_a_worker_speaks_only_in_its_own_name() -> None:
    board = new_board()
    assert board.knows(Identity("default", "digits-w0", "uid-0"))
    assert not board.knows(Identity("default", "digits-w1", "uid-0"))
    assert not board.knows(Identity("default", "digits-w0", "uid-9"))


async def test_workers_of_a_deleted_job_of_the_name_have_its_pods_looked_at_only_now_and_then() -> None:
    looks, look_seconds = 0, 0.02

    class Counting(Loop):
        def workers(self) -> list[Worker]:
            nonlocal looks
            looks += 1
            time.sleep(look_seconds)
            return self.pods

    board, began = new_board(Counting()), time.monotonic()
    while looks < 3:
        assert not board.knows(Identity("default", "digits-w0", "old-0"))
        await asyncio.sleep(0.001)
    assert time.monotonic() - began >= 2 * LOOK_PAUSE_FACTOR * look_seconds
    assert board.knows(Identity("default", "digits-w0", "uid-0")) and looks == 3


async def test_a_broken_connection_is_believed_only_for_the_present_generation() -> None:
    board = new_board()
    await show(board, generation(1, "digits-w0", "digits-w1"))
    async with client_of(board) as client:
        beat = {"layoutGeneration": 1, "step": 3, "lostPeers": ["digits-w1"], "whyBroken": "it closed"}
        response = await client.post("/v1/heartbeat", json=beat, headers=headers())
        assert await response.json() == {
            "layoutGeneration": 1,
            "nextSeconds": 2.0,
            "stop": False,
            "checkpointRequest": "",
        }
        assert board.lost_peers == {"digits-w1"}
        assert board.beats["uid-0"].why_broken == "it closed"
        await show(board, generation(2, "digits-w0"))
        assert not board.lost_peers


async def test_a_heartbeat_of_a_broken_group_looks_at_no_other_worker() -> None:
    """When a group of 4,096 breaks all say so at once, each with 64 names: to compare all took 42 s together."""

    class Alone(Board):
        @property
        def lost_peers(self) -> frozenset[str]:
            raise AssertionError("it reads what all workers said")

    loop = Loop()
    board, worker = Alone(loop, utc_now, Pulse()), Identity("default", "digits-w0", "uid-0")
    woken = []
    for lost in (["digits-w1"], ["digits-w1"], ["digits-w1", "digits-w2"], [], []):
        board.put_heartbeat(worker, Heartbeat(layout_generation=1, lost_peers=lost))
        woken.append(loop.woken)
    assert woken == [1, 1, 2, 3, 3]


async def test_after_silence_of_all_workers_each_gets_time_to_speak() -> None:
    now = start = datetime(2026, 1, 1, tzinfo=UTC)
    board = Board(Loop(), lambda: now, Pulse())
    senders = [Identity("default", worker.name, worker.uid) for worker in WORKERS]
    for second, speaker, since in ((0, 0, 0), (9, 1, 0), (19, 0, 0), (30, 0, 30), (31, 1, 30)):
        now = start + timedelta(seconds=second)
        board.put_heartbeat(senders[speaker], Heartbeat(layout_generation=1))
        assert board.since == start + timedelta(seconds=since), second


async def test_what_was_said_before_the_clock_was_set_back_is_not_said_in_the_future() -> None:
    now = start = datetime(2026, 1, 1, tzinfo=UTC)
    board = Board(Loop(), lambda: now, Pulse())
    waiting = Heartbeat(layout_generation=1, waiting_after=1)
    for worker in WORKERS:
        board.put_heartbeat(Identity("default", worker.name, worker.uid), waiting)
    now = start - timedelta(hours=1)
    board.put_heartbeat(Identity("default", WORKERS[0].name, WORKERS[0].uid), waiting)
    assert board.since == now
    assert set(board.heard.values()) == {now}
    assert {(beat.time, beat.waiting_since) for beat in board.beats.values()} == {(now, now)}


async def test_a_worker_that_is_ready_is_noticed_once_and_hurries_nobody() -> None:
    loop = Loop()
    board = new_board(loop)
    for _ in range(2):
        board.put_ready(Identity("default", "digits-w0", "uid-0"), Ready(address="10.0.0.1:29500"))
    assert (loop.noticed, loop.woken) == (1, 0)


async def test_a_worker_in_no_group_says_since_when_until_it_is_in_one_again() -> None:
    loop = Loop()
    start = datetime(2026, 1, 1, tzinfo=UTC)
    clock = iter(start + timedelta(seconds=second) for second in range(-1, 100))
    board = Board(loop, lambda: next(clock), Pulse())
    await show(board, generation(1, "digits-w0", "digits-w1"))
    sender = Identity("default", "digits-w0", "uid-0")
    said = []
    for number, waiting_after in ((1, None), (1, 1), (1, 1), (1, 2), (3, None)):
        board.put_heartbeat(sender, Heartbeat(layout_generation=number, waiting_after=waiting_after))
        beat = board.beats["uid-0"]
        since = beat.waiting_since and (beat.waiting_since - start).seconds
        said.append((beat.layout_generation, beat.waiting_after, since))
    assert said == [(1, None, None), (1, 1, 1), (1, 1, 1), (1, 2, 3), (3, None, None)]
    assert loop.woken == 2, "each new wait wakes the loop"
