"""Thousands of workers that poll one channel, and what it costs the operator."""

import asyncio
import itertools
import multiprocessing
import random
import resource
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipetransformer_contract.messages import Generation, Member, ResizeReason
from pipetransformer_contract.wire import ChannelPath
from pipetransformer_operator.channel.app import MAX_POLL_SECONDS, Channel
from pipetransformer_operator.channel.authenticator import Identity, TokenTable
from pipetransformer_operator.channel.limits.entrance import Entrance, allow_files, listen, serve
from pipetransformer_operator.channel.tls import buffers as tls_buffers
from pipetransformer_operator.channel.tls.certificate import load_new_certificate, new_authority, server_context
from pipetransformer_operator.plan import Worker
from tests.testkit.operator.channel import Loop, new_board, show
from tests.testkit.operator.scale.request import ChannelClient

NAMESPACE, JOB, JOB_UID = "research", "transformer", "00000000-0000-0000-0000-000000000000"


CLIENTS = 2


#: Connections that one client opens at a time.
OPENED_AT_ONCE = 64


LOOK_SECONDS = 0.01


#: Files of a process besides its connections.
OTHER_FILES = 256


PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What one publication took.

    Attributes:
        seconds_all_told: from the publication until the last worker has its answer.
        loop_lag_seconds: the longest time for which the operator's event loop did nothing else.
        rss_growth_mb: the operator's largest resident size meanwhile, less that before, in 10^6 bytes.
        rss_mb: the operator's resident size before, with all polls open.
    """

    seconds_all_told: float
    loop_lag_seconds: float
    rss_growth_mb: float
    rss_mb: float


def measure(workers: int, *, whole: bool = False) -> Figures:
    """Publish a generation of `workers` workers, all of which wait for it.

    Args:
        workers: of the job.
        whole: whether each asks for the list of all members, as only leaders should.

    Raises:
        OSError: this machine does not allow as many open files as there are connections.
        RuntimeError: one of the processes ended early.
    """
    if (files := allow_files()) < workers + OTHER_FILES:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        text = f"{workers} connections need {workers + OTHER_FILES} open files, the hard limit is {hard}: ulimit -Hn"
        raise OSError(f"{text} (a process may have {files})")
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []

    def start(program: Callable[..., None], *arguments: object) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=program, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
        return ours

    try:
        operator = start(_operate, workers)
        port, trusted = _heard(operator)
        bounds = [workers * part // CLIENTS for part in range(CLIENTS + 1)]
        clients = [start(_poll_all, port, trusted, range(*pair), whole) for pair in itertools.pairwise(bounds)]
        published = _heard(operator)
        told = max(_heard(client) for client in clients)
        operator.send(None)
        return Figures(seconds_all_told=told - published, **_heard(operator))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _heard(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_SECONDS):
        raise RuntimeError(f"a process said nothing for {PATIENCE_SECONDS:g} s")
    try:
        return pipe.recv()
    except EOFError as error:
        raise RuntimeError("a process ended early, its error is above") from error


def _operate(pipe: Connection, workers: int) -> None:
    asyncio.run(_serve(pipe, workers))


async def _serve(pipe: Connection, workers: int) -> None:
    """A channel as the operator wires it, with one job that all workers wait for."""
    tls_buffers.shrink()
    entrance, now = Entrance(allow_files()), datetime.now(UTC)
    context, authority = server_context(), new_authority(now)
    load_new_certificate(context, authority, ["localhost"], now)
    pods = [Worker(number, _name(number), _uid(number)) for number in range(workers)]
    tokens = TokenTable({_token(number): Identity(NAMESPACE, _name(number), _uid(number)) for number in range(workers)})
    board = new_board(Loop(pods))
    await show(board, None)
    channel = Channel({(NAMESPACE, JOB): board}, tokens, most_polls=entrance.most_polls)
    runner = await serve(channel.application(), entrance.guard(listen("127.0.0.1", 0)), context)
    pipe.send((runner.addresses[0][1], authority.certificate.decode()))
    while channel.polls < workers:  # noqa: ASYNC110 - what is measured has no events for it
        await asyncio.sleep(LOOK_SECONDS)
    before = _forget_peak()
    lag = asyncio.create_task(_longest_lag())
    pipe.send(time.monotonic())
    await show(board, _generation(workers))
    await asyncio.to_thread(pipe.recv)
    await asyncio.sleep(2 * LOOK_SECONDS)  # it sees the last delay, too
    lag.cancel()
    pipe.send({"loop_lag_seconds": await lag, "rss_growth_mb": _memory("VmHWM") - before, "rss_mb": before})
    await asyncio.to_thread(pipe.recv)


def _generation(workers: int) -> Generation:
    members = [
        Member(name=_name(number), uid=_uid(number), address=_address(number), node=f"gpu-node-{number // 8}")
        for number in range(workers)
    ]
    return Generation(
        job_uid=JOB_UID,
        layout_generation=1,
        stages=workers,
        pipelines=1,
        members=members,
        leader=members[0].name,
        nonce="0123456789abcdef",
        reason=ResizeReason.START,
    )


async def _longest_lag() -> float:
    """The longest time by which a timer came late; until it is cancelled."""
    longest, loop = 0.0, asyncio.get_running_loop()
    try:
        while True:
            due = loop.time() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            longest = max(longest, loop.time() - due)
    except asyncio.CancelledError:
        return longest


def _forget_peak() -> float:
    """Lets the kernel count this process's largest resident size from now on; the present one in 10^6 bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e6


def _poll_all(pipe: Connection, port: int, trusted: str, numbers: Sequence[int], whole: bool) -> None:
    allow_files()
    pipe.send(asyncio.run(_polled(port, trusted, numbers, whole)))
    pipe.recv()


async def _polled(port: int, trusted: str, numbers: Sequence[int], whole: bool) -> float:
    """When the last of these workers was told."""
    client, opening = ChannelClient(port, trusted), asyncio.Semaphore(OPENED_AT_ONCE)

    async def poll(number: int) -> float:
        headers = {
            "Authorization": f"Bearer {_token(number)}",
            "X-Pipetransformer-Job": f"{NAMESPACE}/{JOB}",
            "Accept-Encoding": "gzip",
        }
        path = f"{ChannelPath.GENERATION}?after=0&members={str(whole).lower()}&timeoutSeconds="
        async with client.line() as line:
            async with opening:  # the first is answered at once
                answer = await line.send("GET", f"{path}0", headers, None, PATIENCE_SECONDS)
            while answer is None:
                answer = await line.send("GET", f"{path}{MAX_POLL_SECONDS:g}", headers, None, PATIENCE_SECONDS)
        assert ("members" in answer) is whole
        return time.monotonic()

    return max(await asyncio.gather(*map(poll, numbers)))


def _name(number: int) -> str:
    return f"{JOB}-w{number}"


def _uid(number: int) -> str:
    """As random as a pod's."""
    return str(uuid.UUID(int=random.Random(number).getrandbits(128)))


def _address(number: int) -> str:
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:29400"


def _token(number: int) -> str:
    return f"token-{number}"
