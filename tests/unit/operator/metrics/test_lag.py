"""How late the operator's event loop is."""

import asyncio
import time

import pytest

from pipetransformer_operator.metrics.lag import PAUSE_SECONDS, watch_lag

pytestmark = pytest.mark.timeout(60)


async def test_what_blocks_the_loop_shows_as_lag() -> None:
    told: asyncio.Queue[float] = asyncio.Queue()

    class Listener:
        def on_lag(self, seconds: float) -> None:
            told.put_nowait(seconds)

    watching = asyncio.create_task(watch_lag(Listener()))
    await told.get()
    time.sleep(PAUSE_SECONDS + 0.2)  # noqa: ASYNC251  # this blocks the loop, which is what is measured
    blocked = await told.get()
    watching.cancel()
    assert blocked >= 0.15
