"""Generations without an operator, for a fixed number of ranks.

Rank 0 is always the leader. It chooses layouts from its own reports, by the contract's `choose`, as the operator does.
It writes each generation into a store that all ranks share. A rank without a role waits, because a later layout may use
it.
"""

import datetime
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from pipetransformer.elastic.transport.groups import Store
from pipetransformer.errors import SpecError
from pipetransformer_contract.choose import Bounds, OnPack, Packing, Present, next_layout
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Generation, Member, Report, ResizeReason

#: Prefix of the identity of every run without an operator.
_FIXED = "fixed-"
#: Seconds between two checks of the store by a follower. It does not wait in the store, because torch warns of each
#: wait that times out.
_LOOK_SECONDS = 0.1
#: How long rank 0 waits for the other ranks to leave. They first read how the run ended.
_LEAVE = datetime.timedelta(seconds=10)
_CLOSED = "closed"
#: Pause between a generation that was not committed and the next choice of a layout. It doubles with each such
#: generation in a row, up to the longest.
_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 60.0, 3600.0


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of a run without an operator.

    Attributes:
        store: shared by all ranks.
        rank: rank of this process.
        addresses: host:port of each rank's own store, by rank.
    """

    store: Store
    rank: int
    addresses: Sequence[str]

    @classmethod
    def meet(cls, store: Store, rank: int, size: int, address: str) -> "World":
        """Tell all ranks the `address` (host:port) of this rank's own store, and wait for those of all other ranks."""
        store.set(f"address/{rank}", address)
        return cls(store, rank, [store.get(f"address/{other}").decode() for other in range(size)])

    def compare(self, arguments: Mapping[str, Any]) -> None:
        """Check that the program of this rank called `train` with the same JSON-able arguments as that of rank 0.

        Raises:
            SpecError: names the first argument that differs.
        """
        if self.rank == 0:
            self.store.set("arguments", json.dumps(arguments))
        theirs = json.loads(self.store.get("arguments"))
        for name, value in json.loads(json.dumps(arguments)).items():
            if value != theirs.get(name):
                raise SpecError(
                    name, f"is {value} on rank {self.rank}, but {theirs.get(name)} on rank 0: all ranks need the same"
                )

    def tell_end(self, end: Mapping[str, Any]) -> None:
        """On rank 0, tell the other ranks how the run ended. `end` must be JSON-able."""
        self.store.set("end", json.dumps(end))

    def end(self) -> dict[str, Any]:
        """Wait until rank 0 calls `tell_end`, and return what it told.

        Raises:
            DistError: rank 0 is gone, or did not tell within the store's timeout.
        """
        end: dict[str, Any] = json.loads(self.store.get("end"))
        return end

    def leave(self) -> None:
        """Leave. Rank 0 waits up to 10 s until all other ranks have left, because its process may host the store."""
        self.store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            with suppress(dist.DistStoreError):
                self.store.wait([f"left/{other}" for other in range(len(self.addresses))], _LEAVE)

    def member(self, rank: int) -> Member:
        return Member(name=worker_name(rank), uid=worker_name(rank), address=self.addresses[rank])


def run_uid(before: str) -> str:
    """Return the identity of a run without an operator.

    It is `before`, the identity in the checkpoint that the run resumes from, if a run without an operator wrote that
    checkpoint. Otherwise it is random.
    """
    return before if before.startswith(_FIXED) else f"{_FIXED}{secrets.token_hex(8)}"


def worker_name(rank: int) -> str:
    """Return the name of a rank in generations and in the record."""
    return f"rank-{rank}"


class Follower:
    """Reads the generations that rank 0 writes. Implements `GenerationSource`, and `ReportSink` without sending any
    report.

    Only the newest generation counts, because rank 0 may have replaced several while this rank was busy.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._num_read = 0
        self._newest: Generation | None = None
        #: Why no generation will follow; empty if one may.
        self._ended = ""
        self._stopped = threading.Event()

    def next_generation(self, after: int) -> Generation:
        own = self._world.member(self._world.rank)
        while not self._stopped.is_set():
            self._read()
            newest = self._newest
            if self._ended:
                raise RendezvousClosedError(self._ended)
            if newest is not None and newest.layout_generation > after and _names(newest, own):
                return newest
            self._stopped.wait(_LOOK_SECONDS)
        raise RendezvousClosedError("the run has ended")

    def newest(self) -> int:
        """Return the number of the newest generation. The end of the run counts as one more, because it ends all
        generations before it."""
        self._read()
        return (0 if self._newest is None else self._newest.layout_generation) + bool(self._ended)

    def _read(self) -> None:
        """Read what rank 0 has written since the last call. Both the training thread and the watchdog's thread call
        this."""
        store = self._world.store
        with self._lock:
            try:
                while not self._ended and store.check([key := f"generation/{self._num_read}"]):
                    content = store.get(key).decode()
                    self._num_read += 1
                    if content == _CLOSED:
                        self._ended = "the run has ended"
                    else:
                        self._newest = Generation.model_validate_json(content)
            except dist.DistError:
                self._ended = "rank 0 has gone"

    def close(self) -> None:
        self._stopped.set()

    def submit(self, report: Report, *, urgent: bool) -> None:
        """Drop the report, because only rank 0 reports."""

    def flush(self, timeout: float | None = None) -> bool:
        return True


class Chooser:
    """Chooses generations on rank 0, by the reports that it makes as the leader. Implements `GenerationSource` and
    `ReportSink`.

    Args:
        world: all ranks.
        bounds: limits of layouts.
        packing: how to choose among layouts.
        first: number of the first generation. It must be above all numbers in the history of a resumed run.
        run_uid: the run's identity.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        world: World,
        bounds: Bounds,
        packing: Packing,
        *,
        first: int,
        run_uid: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world = world
        self._run_uid = run_uid
        self._bounds = bounds
        self._packing = packing
        self._condition = threading.Condition()
        self._generations: list[Generation] = []
        self._closed = False
        self._clock = clock
        #: The newest generation that the leader has reported from, and the number of the newest that it tried to enter.
        self._present: Generation | None = None
        self._tried = 0
        #: The newest generation that was not committed, how many there were in a row, and the time of the next choice.
        self._failed: Generation | None = None
        self._failures = 0
        self._choose_at = 0.0
        self._publish(bounds.initial, first, ResizeReason.START)

    def next_generation(self, after: int) -> Generation:
        """Return the newest generation above `after`. Without one, the leader has lost its group: publish the same
        layout again."""
        with self._condition:
            if self._closed:
                raise RendezvousClosedError("the run has ended")
            if self._generations[-1].layout_generation <= after:
                self._publish(self._generations[-1].layout, after + 1, ResizeReason.FAILURE)
            return self._generations[-1]

    def newest(self) -> int:
        return self._generations[-1].layout_generation

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            with suppress(dist.DistError):  # the store's host may be gone
                self._tell_followers_of_end()

    def submit(self, report: Report, *, urgent: bool) -> None:
        """Take a report of the leader. Publish a generation if another layout is now better than the present one, or
        tell the followers if the run has ended."""
        with self._condition:
            newest = self._generations[-1]
            if report.outcome is not None:
                self._tell_followers_of_end()
                return
            self._note(report)
            if not self._may_choose(report):
                return
            assert self._present is not None
            present = Present(self._present.layout, report.step_seconds, report.remaining_steps)
            best = next_layout(
                report.offers,
                len(self._world.addresses),
                replace(self._bounds, bytes_budget=report.bytes_budget),
                on_pack=OnPack.WIDEN,
                packing=self._packing,
                present=present,
            )
            if best is not None:
                reason = ResizeReason.BALANCE if best == present.layout else ResizeReason.PACK
                self._publish(best, newest.layout_generation + 1, reason)
                self._condition.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def watch(self, after: int) -> Generation:
        """Wait for a generation above `after`, and return the newest one. `GenerationWatcher` calls this once the
        leader has tried to enter `after`. Unlike `next_generation`, it never publishes a generation itself.

        Raises:
            RendezvousClosedError: the run has ended.
        """
        with self._condition:
            self._tried = max(self._tried, after)
            self._condition.wait_for(lambda: self._closed or self._generations[-1].layout_generation > after)
            if self._closed:
                raise RendezvousClosedError("the run has ended")
            return self._generations[-1]

    def _note(self, report: Report) -> None:
        """Note whether the newest generation trains or has failed. It failed if the leader tried to enter it, and still
        reports from the one before."""
        newest = self._generations[-1]
        if _is_from(report, newest):
            if self._present is not newest:
                self._present, self._failures = newest, 0
        elif _is_from(report, self._present) and self._tried >= newest.layout_generation and self._failed is not newest:
            wait = min(_LONGEST_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2.0**self._failures)
            self._failed, self._failures, self._choose_at = newest, self._failures + 1, self._clock() + wait

    def _may_choose(self, report: Report) -> bool:
        """Whether the newest generation trains, or failed long enough ago."""
        newest = self._generations[-1]
        if _is_from(report, newest):
            return True
        return _is_from(report, self._present) and self._failed is newest and self._clock() >= self._choose_at

    def _tell_followers_of_end(self) -> None:
        self._world.store.set(f"generation/{len(self._generations)}", _CLOSED)

    def _publish(self, layout: Layout, number: int, reason: ResizeReason) -> None:
        # Members of these generations may hold state. If the newest one failed, those of the present one hold it.
        before: list[Member] = []
        for generation in (self._present, *self._generations[-1:]):
            before += [] if generation is None else [each for each in generation.members if each not in before]
        members = [self._world.member(rank) for rank in range(layout.workers)]
        generation = Generation(
            job_uid=self._run_uid,
            layout_generation=number,
            stages=layout.stages,
            pipelines=layout.pipelines,
            members=members,
            leavers=[member for member in before if member not in members],
            leader=members[0].name,
            nonce=secrets.token_hex(8),
            reason=reason,
        )
        self._world.store.set(f"generation/{len(self._generations)}", generation.model_dump_json(by_alias=True))
        self._generations.append(generation)


def _is_from(report: Report, generation: Generation | None) -> bool:
    return generation is not None and report.layout_generation == generation.layout_generation


def _names(generation: Generation, member: Member) -> bool:
    return member in [*generation.members, *generation.leavers]
