"""The lease decides which operator may write, although clocks disagree and the API server may be away."""

import asyncio
from typing import Any

import pytest

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.clocks import Sources
from pipetransformer_operator.kube.client.api import NO_QUERY, Api, NotFound, Query
from pipetransformer_operator.kube.client.lease import Lease, LeaseLost
from tests.testkit.operator.fake_lease_api import FakeApi

pytestmark = pytest.mark.timeout(60)
SECONDS = 15


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Gains:
    """When the lease was gained."""

    def __init__(self, clock: Clock) -> None:
        self.times: list[float] = []
        self._clock = clock

    def on_lease_gained(self) -> None:
        self.times.append(self._clock.now)


def lease(api: Api, identity: str, clock: Clock, seconds: int = SECONDS) -> Lease:
    return Lease(api, "system", identity, seconds=seconds, sources=Sources(seconds=clock))


async def test_the_first_holds_it_and_the_second_waits() -> None:
    api, clock = FakeApi(), Clock()
    first, second = lease(api, "a", clock), lease(api, "b", clock)
    await first.acquire()
    assert first.held
    assert await second.attempt() == "a"
    assert not second.held


async def test_a_silent_holder_stops_writing_before_another_takes_over() -> None:
    api, here, there = FakeApi(), Clock(), Clock(1e6)  # the clocks agree on nothing but speed
    first, second = lease(api, "a", here), lease(api, "b", there)
    await first.acquire()
    for _ in range(11 * SECONDS):
        here.now, there.now = here.now + 0.1, there.now + 0.1
        await second.attempt()
        assert not (first.held and second.held)
    assert second.held
    assert api.object is not None
    assert api.object["spec"]["leaseTransitions"] == 1


async def test_a_holder_learns_that_another_took_over() -> None:
    api, clock = FakeApi(), Clock()
    first, second = lease(api, "a", clock, seconds=1), lease(api, "b", clock, seconds=1)
    await first.acquire()
    await second.attempt()
    clock.now += 1
    assert await second.attempt() == "b"
    with pytest.raises(LeaseLost, match="b took over"):
        await first.keep()
    assert not first.held


async def test_a_renewed_lease_is_never_taken() -> None:
    api, clock = FakeApi(), Clock()
    first, second = lease(api, "a", clock), lease(api, "b", clock)
    await first.acquire()
    for _ in range(100):
        clock.now += 2
        assert await first.attempt() == "a"
        assert await second.attempt() == "a"
        assert first.held


async def test_a_holder_renews_with_one_request() -> None:
    api, clock = FakeApi(), Clock()
    first = lease(api, "a", clock)
    await first.acquire()
    api.methods.clear()
    for _ in range(3):
        clock.now += 2
        assert await first.attempt() == "a"
    assert api.methods == ["PUT"] * 3


async def test_a_holder_makes_a_lease_that_was_deleted_again() -> None:
    api, clock = FakeApi(), Clock()
    first = lease(api, "a", clock)
    await first.acquire()
    api.object = None
    assert await first.attempt() == "a"
    assert api.object is not None


async def test_a_lease_that_is_deleted_while_it_is_taken_is_tried_again() -> None:
    api, clock = FakeApi(), Clock()
    await lease(api, "a", clock).acquire()
    answer = api.request

    async def delete_before(method: str, path: str, body: Any = None, **options: Any) -> Object:
        if method == "PUT":
            api.object = None
        return await answer(method, path, body, **options)

    second = lease(api, "a", clock)
    api.request = delete_before  # type: ignore[method-assign]
    assert [await second.attempt(), await second.attempt()] == ["", "a"]


async def test_a_holder_renews_a_lease_that_somebody_labelled() -> None:
    api, clock = FakeApi(), Clock()
    first = lease(api, "a", clock)
    await first.acquire()
    assert api.object is not None
    api.object["metadata"] |= {"labels": {"team": "ml"}, "resourceVersion": "7"}
    assert await first.attempt() == "a"
    assert api.object["metadata"] == {
        "name": "pipetransformer-operator",
        "labels": {"team": "ml"},
        "resourceVersion": "8",
    }


async def test_one_that_starts_again_under_its_name_goes_on_at_once() -> None:
    api, clock = FakeApi(), Clock()
    await lease(api, "a", clock).acquire()
    again = lease(api, "a", clock)
    assert await again.attempt() == "a"
    assert again.held
    assert api.object is not None and api.object["spec"]["leaseTransitions"] == 0


async def test_nothing_is_written_during_an_outage_of_the_server_only() -> None:
    api, clock = FakeApi(), Clock()
    gains, first = Gains(clock), lease(api, "a", clock)
    first.add(gains)
    await first.acquire()
    for _ in range(2):
        clock.now += 1
        await first.attempt()
    api.away = True
    for _ in range(SECONDS):
        clock.now += 1
        assert await first.attempt() == ""
    assert not first.held
    assert gains.times == [0], "a renewal gains nothing"
    api.away = False
    assert await first.attempt() == "a"
    assert gains.times == [0, 2 + SECONDS], "a loop that could not write may try again at once"
    assert first.held


async def test_a_holder_goes_on_renewing_through_an_outage_of_the_server() -> None:
    api, clock = FakeApi(), Clock()
    first = lease(api, "a", clock, seconds=1)
    await first.acquire()
    api.away = True
    keeping = asyncio.create_task(first.keep())
    while len(api.methods) < 5 and not keeping.done():  # noqa: ASYNC110 - its own pauses count
        await asyncio.sleep(0.01)
    api.away = False
    before = api.version
    while api.version == before and not keeping.done():  # noqa: ASYNC110 - its own pauses count
        await asyncio.sleep(0.01)
    assert not keeping.done() and first.held, "nobody else holds it"
    keeping.cancel()


async def test_a_renewal_that_hangs_is_given_up_in_time_for_another() -> None:
    api, clock = FakeApi(), Clock()
    first = lease(api, "a", clock, seconds=1)
    await first.acquire()

    async def hang(method: str, path: str, body: Any = None, **_: Any) -> Object:
        await asyncio.sleep(2)
        raise AssertionError("the lease has expired")

    answer, api.request = api.request, hang  # type: ignore[method-assign]
    assert await first.attempt() == ""
    api.request = answer  # type: ignore[method-assign]
    assert await first.attempt() == "a"


async def test_a_released_lease_is_taken_at_once() -> None:
    api, clock = FakeApi(), Clock()
    first, second = lease(api, "a", clock), lease(api, "b", clock)
    await first.acquire()
    await first.release()
    assert not first.held
    assert await second.attempt() == "b"
    assert second.held


async def test_two_that_start_at_once_are_not_both_the_one() -> None:
    api, clock = FakeApi(), Clock()
    first, second = lease(api, "a", clock), lease(api, "b", clock)

    async def both_read(path: str, query: Query = NO_QUERY, *, timeout: float = 0, accept: str = "") -> Object:
        raise NotFound(path)

    api.get = both_read  # type: ignore[method-assign]  # both see that there is none
    assert [await first.attempt(), await second.attempt()] == ["a", ""]
    assert (first.held, second.held) == (True, False)


async def test_a_lease_counts_from_before_it_was_asked_for() -> None:
    api, clock = FakeApi(), Clock()
    answer = api.request

    async def slowly(method: str, path: str, body: Any = None, **options: Any) -> Object:
        clock.now += 2
        return await answer(method, path, body, **options)

    api.request = slowly  # type: ignore[method-assign]
    first = lease(api, "a", clock)
    assert await first.attempt() == "a"

    clock.now = SECONDS * 2 / 3 - 0.1
    assert first.held
    clock.now = SECONDS * 2 / 3
    assert not first.held, "another operator may count from the moment that it was sent"


async def test_who_waits_for_the_lease_acquires_it_once_it_is_released() -> None:
    api, clock = FakeApi(), Clock()
    first, second = lease(api, "a", clock, seconds=1), lease(api, "b", clock, seconds=1)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    await first.release()
    await waiting
    assert second.held and not first.held


async def test_who_no_longer_holds_the_lease_releases_nothing() -> None:
    api, clock = FakeApi(), Clock()
    first = lease(api, "a", clock)
    await first.acquire()
    clock.now += SECONDS
    await first.release()
    assert api.object is not None and api.object["spec"]["holderIdentity"] == "a"
    assert await first.attempt() == "a"
    api.away = True
    await first.release()
    assert not first.held
