"""How often workers are asked to speak, and what a connection of theirs costs."""

import asyncio
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from datetime import UTC, datetime
from unittest import mock

import pytest

from pipetransformer_operator.channel.board import Board, Reporter
from pipetransformer_operator.channel.limits.pulse import BEATS_PER_SECOND, Pulse
from pipetransformer_operator.channel.tls import buffers
from pipetransformer_operator.channel.tls.certificate import server_context
from pipetransformer_operator.plan import Worker, WorkerPhase


def board_of(pulse: Pulse, *sizes: int) -> Board:
    """A board that sees so many workers, look by look."""
    looks = iter(sizes)
    return board_with(pulse, lambda: [WorkerPhase.RUNNING] * next(looks))


def board_with(pulse: Pulse, look: Callable[[], list[WorkerPhase]]) -> Board:
    """A board that sees a worker of each phase."""

    def workers() -> list[Worker]:
        return [Worker(number, f"digits-w{number}", f"uid-{number}", phase) for number, phase in enumerate(look())]

    return Board(lambda: None, lambda: datetime.now(UTC), pulse, workers)


async def show(board: Board, *, ended: bool = False) -> None:
    await board.show(None, ended=ended)


async def test_workers_beat_the_more_rarely_the_more_there_are() -> None:
    pulse = Pulse()
    first = board_of(pulse, 8, 10 * BEATS_PER_SECOND)
    second = board_of(pulse, 50 * BEATS_PER_SECOND - 8, 8)
    await show(first)
    assert pulse.beat_seconds == 2.0
    await show(second)
    assert pulse.beat_seconds == 50.0
    await show(second)
    assert pulse.beat_seconds == 2.0
    await show(first)
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
    phases = [WorkerPhase.RUNNING] * pods
    boards = [board_with(pulse, lambda: phases) for _ in range(100)]
    for board in boards:
        await show(board)
    assert (pulse.beat_seconds, pulse.report_seconds) == (100 * 10.0, 10.0)
    phases = [WorkerPhase.SUCCEEDED, WorkerPhase.FAILED] * (pods // 2)
    for board in boards:
        await show(board, ended=True)
    assert (pulse.beat_seconds, pulse.report_seconds, pulse.notice_seconds) == (2.0, 5.0, 0.0)
    assert boards[0].knows(Reporter("digits-w0", "uid-0")), "one that is evicted has something to say yet"
    assert pulse.beat_seconds == 2.0
    for board in boards:
        board.close()
    assert (pulse.beat_seconds, pulse.report_seconds, pulse.notice_seconds) == (2.0, 5.0, 0.0)


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
