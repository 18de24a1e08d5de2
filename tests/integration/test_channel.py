"""The channel over TLS, with workers in other processes or threads: its size, and an operator that comes back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipetransformer.elastic.generations.channel_client import ChannelClient
from pipetransformer.elastic.generations.channel_source import ChannelSource
from pipetransformer.elastic.transport.groups import HashStore
from pipetransformer_contract.api.job import MAX_WORKERS
from pipetransformer_operator.channel.app import Channel
from pipetransformer_operator.channel.authenticator import TokenTable
from pipetransformer_operator.channel.board import Board
from pipetransformer_operator.channel.limits.entrance import listen, serve
from pipetransformer_operator.channel.tls.certificate import load_new_certificate, new_authority, server_context
from tests.testkit.operator.channel import TOKENS, generation, new_board, show
from tests.testkit.operator.channel_load import measure
from tests.testkit.operator.operating import free_port

pytestmark = pytest.mark.timeout(300)
AUTHORITY = new_authority(datetime.now(UTC))


def test_4096_polls_are_answered_in_seconds_while_the_operator_serves_others_and_takes_no_memory() -> None:
    figures = measure(MAX_WORKERS)
    assert figures.loop_lag_seconds < 1
    assert figures.rss_growth_mb < 200
    assert figures.seconds_all_told < 30


@asynccontextmanager
async def serving(board: Board, port: int) -> AsyncIterator[Channel]:
    """An operator's channel there."""
    context = server_context()
    load_new_certificate(context, AUTHORITY, ["localhost"], datetime.now(UTC))
    channel = Channel({("default", "digits"): board}, TokenTable(TOKENS))
    runner = await serve(channel.application(), listen("127.0.0.1", port), context)
    try:
        yield channel
    finally:
        await runner.cleanup()


def worker(port: int, folder: Path) -> ChannelSource:
    """The worker `digits-w0`, as a trainer makes it."""
    authority, token = folder / "ca.crt", folder / "token"
    authority.write_bytes(AUTHORITY.certificate)
    token.write_text("token-0")
    client = ChannelClient(f"https://localhost:{port}", "default/digits", "digits-w0", token, authority)
    return ChannelSource(client, "127.0.0.1:1", HashStore())


async def test_a_poll_that_the_operators_restart_cut_off_is_answered_by_the_next_operator(tmp_path: Path) -> None:
    port = free_port()
    source = worker(port, tmp_path)
    async with serving(board := new_board(), port) as channel:
        await show(board, None)
        asks = asyncio.create_task(asyncio.to_thread(source.next_generation, 0))
        while not channel.polls:  # noqa: ASYNC110 - it waits for a thread
            await asyncio.sleep(0.01)
        assert not asks.done()
    await show(board := new_board(), published := generation(7, "digits-w0", "digits-w1"))
    async with serving(board, port):
        assert await asks == published
