"""The channel's entrance: no address takes all connections, and nobody keeps one without a request."""

import asyncio
import logging
import resource
import socket
import ssl
from datetime import UTC, datetime
from typing import Any

import pytest

from pipetransformer_contract.api.job import MAX_WORKERS
from pipetransformer_operator.channel.app import Channel
from pipetransformer_operator.channel.authenticator import TokenTable
from pipetransformer_operator.channel.limits import entrance as channel_entrance
from pipetransformer_operator.channel.limits.entrance import (
    FEW,
    LOG_RATE,
    MAX_CONNECTIONS,
    Entrance,
    allow_files,
    listen,
    serve,
)
from pipetransformer_operator.channel.listener import ChannelListener
from pipetransformer_operator.channel.tls.certificate import load_new_certificate, new_authority, server_context

pytestmark = pytest.mark.timeout(60)
MANY_FILES = 1_000_000


def admitted(entrance: Entrance, address: str, asks: int = MAX_CONNECTIONS) -> int:
    return sum(entrance.admit(address) for _ in range(asks))


def test_one_address_takes_half_of_all_connections_and_then_each_a_few(caplog: pytest.LogCaptureFixture) -> None:
    refused: list[None] = []

    class Counting(ChannelListener):
        def on_shut_out(self) -> None:
            refused.append(None)

    entrance = Entrance(MANY_FILES, Counting())
    with caplog.at_level(logging.WARNING):
        assert admitted(entrance, "10.0.0.1") == MAX_CONNECTIONS // 2
    assert len(refused) == MAX_CONNECTIONS // 2
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "pipetransformer_operator.channel.limits.entrance"
    ]
    assert len(said) == LOG_RATE[1]
    assert said[0] == (
        "closing a connection of 10.0.0.1: it has 6000 open connections, of 6000 in total and at most 12000"
    )
    assert admitted(entrance, "10.0.0.2") == FEW
    others = sum(admitted(entrance, f"10.0.1.{number}", FEW + 1) for number in range(200))
    assert others == MAX_CONNECTIONS // 2 - FEW
    entrance.leave("10.0.0.1")
    assert entrance.open == MAX_CONNECTIONS - 1
    assert not entrance.admit("10.0.0.1")
    assert entrance.admit("10.0.0.4")


def test_workers_of_two_jobs_of_the_largest_size_wait_together() -> None:
    entrance = Entrance(MANY_FILES)
    assert admitted(entrance, "10.0.0.1", MAX_WORKERS) == MAX_WORKERS, "one behind a single address"
    assert sum(admitted(entrance, f"10.0.1.{number}", 8) for number in range(MAX_WORKERS // 8)) == MAX_WORKERS
    assert 2 * MAX_WORKERS <= entrance.most_polls < MAX_CONNECTIONS


@pytest.mark.parametrize(("files", "connections"), [(1024, 768), (256, 128)])
def test_files_are_left_for_all_else(files: int, connections: int) -> None:
    entrance = Entrance(files)
    assert sum(admitted(entrance, f"10.0.0.{number}") for number in range(100)) == connections


def test_as_many_files_as_may_be_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    assert allow_files() == 4096
    assert limits[-1] == (4096, 4096)


@pytest.mark.parametrize(
    ("host", "reached"),
    [("", {"127.0.0.1", "::1"}), ("127.0.0.1", {"127.0.0.1"}), ("::1", {"::1"})],
    ids=["all", "one of IPv4", "one of IPv6"],
)
def test_it_listens_at_ipv4_and_ipv6(host: str, reached: set[str]) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with listen(host, 0) as listening:
        assert {address for address in ("127.0.0.1", "::1") if answers(address, listening)} == reached


def test_it_listens_where_there_is_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen("", 0) as listening:
        assert answers("127.0.0.1", listening)


def answers(address: str, listening: socket.socket) -> bool:
    try:
        socket.create_connection((address, listening.getsockname()[1]), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


class Watched(Entrance):
    """One that tells of each change."""

    def __init__(self, files: int) -> None:
        super().__init__(files)
        self.changed = asyncio.Event()

    def admit(self, address: str) -> bool:
        self.changed.set()
        return super().admit(address)

    def leave(self, address: str) -> None:
        self.changed.set()
        super().leave(address)


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Listening:
    """A channel over TLS."""

    def __init__(self, files: int = MANY_FILES) -> None:
        self.entrance = Watched(files)

    async def __aenter__(self) -> "Listening":
        now, context = datetime.now(UTC), server_context()
        load_new_certificate(context, new_authority(now), ["127.0.0.1"], now)
        listening = self.entrance.guard(listen("", 0))
        self._port = listening.getsockname()[1]
        self._runner = await serve(Channel({}, TokenTable({})).application(), listening, context)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()
        await self.until_open(0)

    async def until_open(self, connections: int) -> None:
        while self.entrance.open != connections:
            self.entrance.changed.clear()
            await self.entrance.changed.wait()

    async def connect(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection from one of this machine's addresses, without TLS."""
        return await asyncio.open_connection("127.0.0.1", self._port, local_addr=(address, 0))

    def connect_silently(self, *, tls: bool) -> socket.socket:
        """A connection that answers nothing, except to begin TLS where it is to."""
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=5)
        return _trusting().wrap_socket(connection) if tls else connection

    async def ask(self, address: str, request: bytes = b"GET / HTTP/1.0\r\n\r\n") -> bytes:
        """What is answered in all; nothing where the connection was closed."""
        reader, writer = await self.connect(address)
        try:
            await writer.start_tls(_trusting())
            writer.write(request)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def test_who_holds_many_connections_without_a_word_shuts_nobody_else_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_entrance, "FEW", 1)
    async with Listening(files=20) as channel:
        held = [await channel.connect("127.0.0.1") for _ in range(8)]
        assert [await reader.read() for reader, _ in held[5:]] == [b""] * 3, "closed at once"
        assert channel.entrance.open == 5
        assert b"404" in await channel.ask("127.0.0.2")
        held[0][1].close()
        await channel.until_open(4)
        assert b"404" in await channel.ask("127.0.0.1")
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize("request_", [b"", b"GET / HTTP/1.1\r\nHost: "], ids=["none", "half of one"])
async def test_a_connection_is_closed_when_its_request_does_not_come(
    request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_entrance, "IDLE_SECONDS", 0.1)
    async with Listening() as channel:
        assert await channel.ask("127.0.0.1", request_) == b""


def let_tls_begin_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers wait a minute for TLS to begin, because a client on a busy machine may need long for it."""
    loop = asyncio.get_running_loop()
    create = loop.create_server

    async def patient(*arguments: Any, **options: Any) -> asyncio.Server:
        return await create(*arguments, **options | {"ssl_handshake_timeout": 60.0})

    monkeypatch.setattr(loop, "create_server", patient)


@pytest.mark.parametrize("tls", [False, True], ids=["before TLS", "at its end"])
async def test_who_says_nothing_of_tls_holds_no_connection(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_entrance, "IDLE_SECONDS", 0.1)
    if tls:
        let_tls_begin_late(monkeypatch)
    async with Listening() as channel:
        opened = asyncio.create_task(channel.until_open(1))
        with await asyncio.to_thread(channel.connect_silently, tls=tls):
            async with asyncio.timeout(5):
                await opened
                await channel.until_open(0)


async def test_a_connection_that_never_was_tls_takes_no_place_when_it_ends() -> None:
    async with Listening() as channel:
        reader, writer = await channel.connect("127.0.0.1")
        await channel.until_open(1)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        await reader.read()
        writer.close()
        await channel.until_open(0)
