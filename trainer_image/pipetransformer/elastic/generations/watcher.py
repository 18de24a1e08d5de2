"""Lets the leader know of a newer generation, although its training thread never waits for one."""

import threading
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousClosedError

from pipetransformer_contract.messages import Generation


class GenerationWatcher:
    """Waits for the next generation in a thread.

    Args:
        wait: waits for a generation above the given number and returns it, like `GenerationSource.next_generation`.
    """

    def __init__(self, wait: Callable[[int], Generation]) -> None:
        self._wait = wait
        self._lock = threading.Lock()
        self._found: Generation | None = None
        self._watching = -1

    def watch(self, after: int) -> None:
        """Begin to wait for a generation above `after`. Does nothing if the last call had the same `after`."""
        with self._lock:
            if self._watching == after:
                return
            self._watching = after
            self._found = None
        threading.Thread(target=self._run, args=(after,), name=f"watch-generation-{after}", daemon=True).start()

    def found(self, after: int) -> Generation | None:
        """Return a generation above `after` if one has been found, otherwise None. Never blocks."""
        found = self._found
        return found if found is not None and found.layout_generation > after else None

    def _run(self, after: int) -> None:
        try:
            generation = self._wait(after)
        except RendezvousClosedError:
            return
        with self._lock:
            if self._watching == after:
                self._found = generation
