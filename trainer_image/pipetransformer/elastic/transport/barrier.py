"""A barrier behind work of which nobody knows how long it takes, such as storage.

Until all have done theirs, the members vote again and again on whether anybody is still at it. So slow storage is
waited for, and who hangs is found by the vote that it misses, as in a round.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
import torch.distributed as dist

from .connections import Connections
from .groups import GenerationGroups
from .watchdog import ROUND, Deadline, Watchdog

T = TypeVar("T")

#: Between the votes of those who are at it; the others wait in the vote.
_VOTE_SECONDS = 0.02


class Barrier:
    """One worker's, for as long as it lives: what a broken generation has left undone ends before other work begins.

    Work in the thread may change torch's default type, which is the process's: `from_pretrained` does while it makes a
    model. So whatever is sent names its own.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="barrier")

    def pass_after(self, work: Callable[[], T] | None, groups: GenerationGroups) -> T | None:
        """Do this worker's part, in a thread, and return what it gave once all have done theirs. All members of
        `groups.world` call this.

        Args:
            work: None where this worker only waits. It must not refer to the groups: when they break, it may go on.
            groups: of the generation.

        Raises:
            RuntimeError: a connection broke, or a member hangs.
            Exception: what `work` raised. The others will not pass: their connections to this worker have to close.
        """
        assert groups.world is not None
        return self._pass(work, groups.world, Deadline(0.0), groups.connections)

    def pass_within(self, work: Callable[[], T] | None, group: dist.ProcessGroup, deadline: Deadline) -> T | None:
        """As `pass_after`, by all of `group`. The caller watches the connections; each vote puts its `deadline` off."""
        return self._pass(work, group, deadline, None)

    def _pass(
        self,
        work: Callable[[], T] | None,
        group: dist.ProcessGroup,
        deadline: Deadline,
        connections: Connections | None,
    ) -> T | None:
        """Vote until all are done. `connections` are watched in each vote, unless the caller does."""
        done = None if work is None else self._thread.submit(work)
        try:
            while True:
                if done is not None:
                    wait([done], _VOTE_SECONDS)
                busy = torch.tensor([float(done is not None and not done.done())], dtype=torch.float32)
                result = None if done is None or busy else done.result()
                deadline.put_off(self._watchdog.limit(ROUND))
                with (
                    contextlib.nullcontext() if connections is None else self._watchdog.watching(connections, deadline)
                ):
                    dist.all_reduce(busy, group=group)
                if not busy:
                    return result
        finally:
            del done  # what it raises refers to this frame and so to the group, whose sockets would stay open

    def _watching(self, connections: Connections | None, deadline: Deadline) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if connections is None else self._watchdog.watching(connections, deadline)
