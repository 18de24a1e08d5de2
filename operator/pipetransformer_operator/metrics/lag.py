"""How late the operator's event loop is. While something blocks it, heartbeats, polls and probes wait."""

import asyncio
from typing import Protocol

PAUSE_SECONDS = 0.25


class LagListener(Protocol):
    """Is told how late the event loop was."""

    def on_lag(self, seconds: float) -> None:
        """A pause took this much longer than it was asked for."""
        ...


async def watch_lag(listener: LagListener) -> None:
    """Tells the listener endlessly how late the event loop is."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PAUSE_SECONDS
        await asyncio.sleep(PAUSE_SECONDS)
        listener.on_lag(max(0.0, loop.time() - due))
