"""A barrier behind work of unknown length, such as storage.

The members vote again and again until all have finished. So they wait for slow storage, but find a worker that hangs by
the vote that it misses.
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
#: Work of unknown length, for a thread.
Work = Callable[[], T]

#: Between two votes of a worker that still works. The others wait in the vote.
_VOTE_SECONDS = 0.02


class Barrier:
    """One worker's barrier, for as long as it lives. Work that a broken generation left ends before other work begins.

    Work in the thread may change torch's default dtype for the whole process, as `from_pretrained` does. So every
    tensor that is sent names its dtype.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="barrier")

    def pass_after(self, work: Work[T] | None, groups: GenerationGroups) -> T | None:
        """Do this worker's part in a thread, and return its result once all have done theirs. All members of
        `groups.world` call this.

        Args:
            work: None if this worker only waits. It must not refer to the groups, because it may outlive them.
            groups: of the generation.

        Raises:
            RuntimeError: a connection broke, or a member hangs.
            Exception: what `work` raised. The other workers still wait, so this worker has to close its connections.
        """
        assert groups.world is not None
        return self._pass(work, groups.world, Deadline(0.0), groups.connections)

    def pass_within(self, work: Work[T] | None, group: dist.ProcessGroup, deadline: Deadline) -> T | None:
        """As `pass_after`, by all of `group`. The caller watches the connections; each vote puts its `deadline` off."""
        return self._pass(work, group, deadline, None)

    def _pass(
        self,
        work: Work[T] | None,
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
                with self._watching(connections, deadline):
                    dist.all_reduce(busy, group=group)
                if not busy:
                    return result
        finally:
            del done  # its exception refers to this frame, and so to the group, whose sockets would stay open

    def _watching(self, connections: Connections | None, deadline: Deadline) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if connections is None else self._watchdog.watching(connections, deadline)
