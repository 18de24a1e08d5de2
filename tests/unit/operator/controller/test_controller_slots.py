"""What may be done at once: in turn, and no namespace takes all of it."""

import asyncio
from contextlib import suppress

import pytest

from pipetransformer_operator.controller.slots import Slots

pytestmark = pytest.mark.timeout(60)


class Doing:
    """Things that hold a slot each until they are told to end."""

    def __init__(self, number: int) -> None:
        self.slots = Slots(number)
        self.begun: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def ask(self, namespace: str, *names: str) -> None:
        """Asks for a slot for each."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._do(namespace, name))
        await self._look()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            await self._tasks[name]
        await self._look()

    async def cancel(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
            with suppress(asyncio.CancelledError):
                await self._tasks[name]
        await self._look()

    async def _look(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def _do(self, namespace: str, name: str) -> None:
        async with self.slots.of(namespace):
            self.begun.append(name)
            await self._ends[name].wait()


async def test_one_namespace_gets_half_of_the_slots_and_several_an_equal_part() -> None:
    doing = Doing(9)
    await doing.ask("a", *(f"a{number}" for number in range(9)))
    assert doing.begun == ["a0", "a1", "a2", "a3", "a4"]
    await doing.ask("b", *(f"b{number}" for number in range(9)))
    assert doing.begun[5:] == ["b0", "b1"]
    await doing.end("a0", "a1", "b0")
    assert doing.begun[7:] == ["b2", "a5", "b3"]
    await doing.ask("c", "c0")
    assert doing.begun[10:] == ["c0"]


async def test_who_asked_first_comes_first_whatever_its_namespace() -> None:
    doing = Doing(4)
    await doing.ask("a", "a0", "a1", "a2")
    await doing.ask("b", "b0", "b1")
    await doing.ask("a", "a3")
    assert doing.begun == ["a0", "a1", "b0"]
    await doing.end("a0", "b0")
    assert doing.begun[3:] == ["a2", "b1"]
    await doing.end("a1", "a2", "b1")
    assert doing.begun[5:] == ["a3"]


async def test_who_is_cancelled_gives_its_slot_back_or_its_place_in_the_row() -> None:
    doing = Doing(2)
    await doing.ask("a", "a0", "a1", "a2")
    await doing.cancel("a1")
    await doing.cancel("a0")
    assert doing.begun == ["a0", "a2"]
    await doing.end("a2")
    await doing.ask("a", "a3")
    assert doing.begun[2:] == ["a3"]


async def test_a_slot_that_comes_with_the_cancellation_is_not_lost() -> None:
    slots = Slots(1)
    ended = asyncio.Event()

    async def do() -> None:
        async with slots.of("a"):
            await ended.wait()

    first, second = asyncio.create_task(do()), asyncio.create_task(do())
    await asyncio.sleep(0)
    ended.set()
    await first
    second.cancel()  # its turn has come, and it does not know yet
    await asyncio.gather(second, return_exceptions=True)
    async with slots.of("b"):
        pass
