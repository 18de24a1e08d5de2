"""A barrier behind work of which nobody knows how long it takes, such as writing to storage.

Until all have done theirs, the members vote again and again on whether anybody is still at it. So slow storage is
waited for, and who hangs is found by the vote that it misses, as in a round.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

from .groups import GenerationGroups
from .watchdog import Watchdog

T = TypeVar("T")

_VOTE_SECONDS = 0.02


class Barrier:
    """One worker's, for as long as it lives: what a broken generation has left undone ends before other work begins."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="barrier")

    def pass_after(self, work: Callable[[], T] | None, groups: GenerationGroups) -> T | None:
        """Do this worker's part, in a thread, and return what it gave once all have done theirs. All members of
        `groups.world` call this.

        Args:
            work: None where this worker only waits.
            groups: of the generation.

        Raises:
            RuntimeError: a connection broke, or a member hangs.
            Exception: what `work` raised. The others will not pass: their connections to this worker have to close.
        """
        done = None if work is None else self._thread.submit(work)
        while True:
            busy = torch.tensor([float(done is not None and not done.done())])
            result = None if done is None or busy else done.result()
            with self._watchdog.timing("barrier", groups.connections, rounds=1):
                dist.all_reduce(busy, group=groups.world)
            if not busy:
                return result
            time.sleep(_VOTE_SECONDS)
