"""How often workers are asked to speak, and what a connection of theirs costs."""

import asyncio
from asyncio.sslproto import SSLProtocol
from datetime import UTC, datetime

import pytest

from pipetransformer_operator.channel import tls_buffers
from pipetransformer_operator.channel.board import Board
from pipetransformer_operator.channel.certificate import server_context
from pipetransformer_operator.channel.pulse import BEATS_PER_SECOND, Pulse


def board_of(pulse: Pulse, *sizes: int) -> Board:
    """A board that sees so many workers, look by look."""
    looks = iter(sizes)

    def workers() -> list[tuple[str, str]]:
        return [(f"digits-w{number}", f"uid-{number}") for number in range(next(looks))]

    return Board(lambda: None, lambda: datetime.now(UTC), pulse, workers)


async def show(board: Board) -> None:
    await board.show(None, job_uid="job", ended=False)


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


async def test_a_tls_connection_has_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SSLProtocol, "max_size", SSLProtocol.max_size)
    tls_buffers.shrink()
    loop = asyncio.get_running_loop()
    protocol = SSLProtocol(loop, asyncio.Protocol(), server_context(), loop.create_future(), server_side=True)
    assert len(protocol.get_buffer(-1)) == tls_buffers.READ_BYTES
