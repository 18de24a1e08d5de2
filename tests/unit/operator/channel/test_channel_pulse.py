"""How often workers are asked to speak, and what a connection of theirs costs."""

import asyncio
from asyncio.sslproto import SSLProtocol
from unittest import mock

import pytest

from pipetransformer_operator.channel.authenticator import Identity
from pipetransformer_operator.channel.board import Board
from pipetransformer_operator.channel.limits.pulse import BEATS_PER_SECOND, Pulse
from pipetransformer_operator.channel.tls import buffers
from pipetransformer_operator.channel.tls.certificate import server_context
from pipetransformer_operator.clocks import utc_now
from pipetransformer_operator.plan import Worker, WorkerPhase
from tests.testkit.operator.channel import Loop, generation, show


def board_of(pulse: Pulse, *sizes: int) -> Board:
    """A board that sees so many workers, look by look."""
    return Board(Looks(*([WorkerPhase.RUNNING] * size for size in sizes)), utc_now, pulse)


class Looks(Loop):
    """A job's loop whose workers have these phases, look by look; the last ones are also those of later looks."""

    def __init__(self, *looks: list[WorkerPhase]) -> None:
        super().__init__()
        self.looks = list(looks)

    def workers(self) -> list[Worker]:
        phases = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return [Worker(number, f"digits-w{number}", f"uid-{number}", phase) for number, phase in enumerate(phases)]


async def test_workers_beat_the_more_rarely_the_more_there_are() -> None:
    pulse = Pulse()
    first = board_of(pulse, 8, 10 * BEATS_PER_SECOND)
    second = board_of(pulse, 50 * BEATS_PER_SECOND - 8, 8)
    await show(first, None)
    assert pulse.beat_seconds == 2.0
    await show(second, None)
    assert pulse.beat_seconds == 50.0
    await show(second, None)
    assert pulse.beat_seconds == 2.0
    await show(first, None)
    first.close()
    assert pulse.beat_seconds == 2.0


def test_progress_and_words_are_the_rarer_the_more_jobs_there_are() -> None:
    pulse = Pulse()
    boards = [board_of(pulse) for _ in range(1000)]
    assert pulse.report_seconds == pulse.words_seconds == 100.0
    for board in boards[10:]:
        board.close()
    assert (pulse.report_seconds, pulse.words_seconds) == (5.0, 1.0)


async def test_finished_jobs_and_the_pods_that_they_keep_slow_nobody() -> None:
    pulse, pods = Pulse(), 10 * BEATS_PER_SECOND
    looks = Looks([WorkerPhase.RUNNING] * pods)
    boards = [Board(looks, utc_now, pulse) for _ in range(100)]
    for board in boards:
        await show(board, None)
    assert (pulse.beat_seconds, pulse.report_seconds) == (100 * 10.0, 10.0)
    looks.looks = [[WorkerPhase.SUCCEEDED, WorkerPhase.FAILED] * (pods // 2)]
    for board in boards:
        await show(board, None, ended=True)
    assert (pulse.beat_seconds, pulse.report_seconds, pulse.notice_seconds) == (2.0, 5.0, 0.0)
    assert boards[0].knows(Identity("default", "digits-w0", "uid-0")), "one that is evicted has something to say yet"
    assert pulse.beat_seconds == 2.0
    for board in boards:
        board.close()
    assert (pulse.beat_seconds, pulse.report_seconds, pulse.notice_seconds) == (2.0, 5.0, 0.0)


async def test_a_layout_changes_no_pace_and_jobs_that_are_gone_leave_none() -> None:
    pulse, looks = Pulse(), Looks([WorkerPhase.RUNNING] * 2 * BEATS_PER_SECOND)
    boards = [Board(looks, utc_now, pulse) for _ in range(100)]
    for number in (None, 1, 2):
        for board in boards:
            await show(board, generation(number, "digits-w0") if number else None)
        assert (pulse.beat_seconds, pulse.report_seconds, pulse.notice_seconds) == (200.0, 10.0, 0.2)
    for board in boards:
        board.close()
    pulse.add(workers=4 * BEATS_PER_SECOND, jobs=50)
    assert (pulse.beat_seconds, pulse.notice_seconds) == (4.0, 0.1)


async def test_all_jobs_together_write_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, now = Pulse(), 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    assert [pulse.take_words() for _ in range(12)] == [True] * 10 + [False] * 2
    now = 1.0
    assert [pulse.take_words() for _ in range(2)] == [True, False]


async def test_a_tls_connection_has_small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("max_size", "connection_made"):
        monkeypatch.setattr(SSLProtocol, name, getattr(SSLProtocol, name))
    buffers.shrink()
    loop = asyncio.get_running_loop()
    protocol = SSLProtocol(loop, asyncio.Protocol(), server_context(), loop.create_future(), server_side=True)
    assert len(protocol.get_buffer(-1)) == buffers.READ_BYTES
    below = mock.Mock(asyncio.WriteTransport)
    protocol.connection_made(below)
    below.set_write_buffer_limits.assert_called_once_with(high=buffers.WRITE_BYTES)
