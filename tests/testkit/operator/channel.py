"""A channel with one board, and requests to it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from pipetransformer_contract.messages import Generation, Member, Report, ResizeReason
from pipetransformer_operator.channel.app import Channel
from pipetransformer_operator.channel.authenticator import Identity, TokenTable
from pipetransformer_operator.channel.board import Board
from pipetransformer_operator.channel.limits.pulse import Pulse
from pipetransformer_operator.clocks import utc_now
from pipetransformer_operator.plan import Worker

WORKERS = [Worker(0, "digits-w0", "uid-0"), Worker(1, "digits-w1", "uid-1")]


TOKENS = {
    "token-0": Identity("default", "digits-w0", "uid-0"),
    "token-1": Identity("default", "digits-w1", "uid-1"),
    "foreign": Identity("default", "other-w0", "uid-9"),
    "elsewhere": Identity("kube-system", "digits-w0", "uid-0"),
}


def headers(token: str = "token-0", job: str = "default/digits") -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "X-Pipetransformer-Job": job}


def generation(number: int, *names: str) -> Generation:
    members = [Member(name=name, uid=name.replace("digits-w", "uid-"), address="127.0.0.1:1") for name in names]
    return Generation(
        job_uid="job",
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


async def show(board: Board, published: Generation | None, *, ended: bool = False) -> None:
    """What a turn of the job's loop tells its board."""
    board.learn(board._owner.workers())
    await board.show(published, ended=ended)


@dataclass
class Loop:
    """A job's loop as its board sees it: these are its workers, and it counts how often it was told of news."""

    pods: list[Worker] = field(default_factory=lambda: WORKERS)
    woken: int = 0
    noticed: int = 0

    def wake(self) -> None:
        self.woken += 1

    def notice(self) -> None:
        self.noticed += 1

    def workers(self) -> list[Worker]:
        return self.pods


def new_board(loop: Loop | None = None) -> Board:
    return Board(loop or Loop(), utc_now, Pulse())


@asynccontextmanager
async def client_of(board: Board, authenticator: Any = None) -> AsyncIterator[TestClient[Any, Any]]:
    channel = Channel({("default", "digits"): board}, authenticator or TokenTable(TOKENS))
    async with TestClient(TestServer(channel.application())) as client:
        yield client
