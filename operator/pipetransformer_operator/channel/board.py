"""A board between one job's loop and the HTTP requests of its workers.

HTTP handlers write to the board and wait on it. The job's loop reads it, and shows a generation on it once that is
durable. The two never call each other. The board lives as long as the operator knows the job; after a restart workers
say everything again.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Protocol

from pipetransformer_contract.messages import Generation, Heartbeat, Ready, Report
from pipetransformer_operator.clocks import Clock
from pipetransformer_operator.plan.types import SHORTEST_PACE, Beat, Worker, WorkerPhase

from .announcement import Announcement
from .authenticator import Identity
from .limits.pulse import Pulse

#: If all workers are silent for this long, at the shortest pace, the operator may have been cut off. Once it hears one
#: worker again, it gives the others time.
DEAF = timedelta(seconds=10)
#: Polls of one worker that may wait at once: two of its threads ask, and a broken connection may still count.
MAX_POLLS = 4
#: If a sender is unknown, the board looks at the pods of the job, which takes 70 ms for 4,096. Until the next look it
#: waits this many times as long, because the workers of a deleted job of the same name ask until they end.
LOOK_PAUSE_FACTOR = 10
#: Polls answered before the event loop does anything else; each answer takes half a millisecond.
TOLD_AT_ONCE = 32


class Ended(Exception):
    """The job has ended: a worker that polls or sends a heartbeat must exit."""


class NotYetDurable(Exception):
    """The report did not become durable in time; the worker must send it again."""


class BoardOwner(Protocol):
    """The job's loop, as its board sees it."""

    def wake(self) -> None:
        """The board has something new that a worker waits for."""
        ...

    def notice(self) -> None:
        """The board has something new that may matter together with what follows soon."""
        ...

    def workers(self) -> Iterable[Worker]:
        """The job's workers as known now, including ended ones."""
        ...


class Board:
    """What the workers of one job reported, and the generation that they may see.

    Args:
        owner: the job's loop.
        clock: the present time, with its time zone.
        pulse: the pace of all jobs' workers. The board tells it how many workers this job has.

    Attributes:
        stop: whether the members must write a checkpoint and exit; heartbeats answer with it.
        checkpoint_request: token of the checkpoint that the members shall write now; heartbeats and reports are
            answered with it.
        shown: whether the loop has looked at the job since the operator's start.
        since: when a worker was heard again after all were silent for `DEAF`; at first, when the board was created.
    """

    def __init__(self, owner: BoardOwner, clock: Clock, pulse: Pulse) -> None:
        self._owner = owner
        self._clock = clock
        self.pulse = pulse
        self._counted = 0, 0
        self._next_look = float("-inf")
        self.since = self._newest = clock()
        self._settling = asyncio.Condition()
        self._workers: dict[str, str] = {}
        self._ready: dict[str, Ready] = {}
        self._heard: dict[str, datetime] = {}
        self._beats: dict[str, Beat] = {}
        self._lost_peers: dict[str, frozenset[str]] = {}
        self._polls: dict[str, list[asyncio.Future[bool]]] = {}
        self._report: Report | None = None
        self._announced: Announcement | None = None
        self.shown = False
        self._ended = False
        self.stop = False
        self.checkpoint_request = ""
        self._arrived = 0
        self._settled = 0
        self._count(workers=0, jobs=1)

    # What the loop reads.

    @property
    def ready(self) -> Mapping[str, Ready]:
        """What warm workers said, by UID."""
        return dict(self._ready)

    @property
    def heard(self) -> Mapping[str, datetime]:
        """When each worker was last heard, by UID."""
        return dict(self._heard)

    @property
    def beats(self) -> Mapping[str, Beat]:
        """Each worker's newest heartbeat, by UID."""
        return dict(self._beats)

    @property
    def report(self) -> Report | None:
        """The newest report, or None before the first."""
        return self._report

    @property
    def lost_peers(self) -> frozenset[str]:
        """Peers that workers of the shown generation may have lost, according to those whose group broke."""
        present, lost = self.layout_generation, set[str]()
        for uid, names in self._lost_peers.items():
            beat = self._beats[uid]
            if present in (beat.layout_generation, beat.waiting_after):
                lost |= names
        return frozenset(lost)

    @property
    def arrived(self) -> int:
        """How many reports arrived. Pass it to `settle` once a durable status contains them."""
        return self._arrived

    # What the loop says.

    def learn(self, workers: Iterable[Worker]) -> None:
        """Notes which workers exist now. A worker that is new between this call and `show` is not forgotten."""
        there = list(workers)
        self._workers = {worker.uid: worker.name for worker in there}
        speaking = sum(worker.phase in (WorkerPhase.PENDING, WorkerPhase.RUNNING) for worker in there)
        self._count(workers=speaking, jobs=self._counted[1])

    async def show(
        self, generation: Generation | None, *, ended: bool, stop: bool = False, checkpoint_request: str = ""
    ) -> None:
        """Shows the durable generation to workers, and forgets workers that `learn` did not name. Returns once all
        waiting polls that it concerns are answered.

        Args:
            generation: the generation in the written status; None before the first.
            ended: whether the job has ended.
            stop: whether the members must write a checkpoint and exit.
            checkpoint_request: token of the checkpoint that the members shall write now; empty without one.
        """
        self.stop, self.checkpoint_request = stop, checkpoint_request
        generation = generation.for_workers() if generation else None
        self.shown = True
        present = self._announced.generation if self._announced else None
        changed = generation != present or ended != self._ended
        if changed:
            self._announced, self._ended = Announcement(generation) if generation else None, ended
            self._count(workers=self._counted[0], jobs=0 if ended else 1)
            await self._tell()
        for memory in (self._ready, self._heard, self._beats, self._lost_peers, self._polls):
            for uid in memory.keys() - self._workers.keys():
                del memory[uid]

    async def settle(self, arrived: int) -> None:
        """Tells the senders of the first `arrived` reports that the status contains what they said."""
        async with self._settling:
            self._settled = max(self._settled, arrived)
            self._settling.notify_all()

    def close(self) -> None:
        """The job is gone."""
        self._workers = {}
        self._count(workers=0, jobs=0)

    # What workers ask and say.

    @property
    def job_uid(self) -> str:
        """UID of the job that the published generations belong to; empty before the first."""
        return self._announced.generation.job_uid if self._announced else ""

    @property
    def layout_generation(self) -> int:
        """Number of the newest published generation, 0 before the first."""
        return self._announced.generation.layout_generation if self._announced else 0

    def knows(self, sender: Identity) -> bool:
        """Whether the sender is a worker of this job, even one that was created after the last turn."""
        seconds = asyncio.get_running_loop().time
        if sender.uid not in self._workers and (began := seconds()) >= self._next_look:
            self.learn(self._owner.workers())
            self._next_look = began + LOOK_PAUSE_FACTOR * (seconds() - began)
        return self._workers.get(sender.uid) == sender.name

    def belongs(self, sender: Identity) -> bool:
        """Whether the sender is a member or a leaver of the published generation."""
        return self._announced is not None and sender.uid in self._announced.uids

    def put_ready(self, sender: Identity, ready: Ready) -> None:
        """Notes that the worker is warm."""
        self._hear(sender)
        if self._ready.get(sender.uid) != ready:
            self._ready[sender.uid] = ready
            self._owner.notice()  # most often others must be ready, too, before anything follows

    def put_heartbeat(self, sender: Identity, heartbeat: Heartbeat) -> float:
        """Notes a sign of life. Returns seconds until the next is expected.

        Raises:
            Ended: the job has ended.
        """
        now, uid = self._hear(sender), sender.uid
        if self._ended:
            raise Ended("the job has ended")
        before = self._beats.get(uid)
        since = None
        if heartbeat.waiting_after is not None:
            same = before is not None and before.waiting_after == heartbeat.waiting_after
            since = before.waiting_since if before is not None and same else now
        pause = self.pulse.beat_seconds
        self._beats[uid] = Beat(
            time=now,
            layout_generation=heartbeat.layout_generation,
            waiting_after=heartbeat.waiting_after,
            waiting_since=since,
            pace=timedelta(seconds=pause),
            why_broken=heartbeat.why_broken,
            unsaved=heartbeat.unsaved,
        )
        lost, known = frozenset(heartbeat.lost_peers), self._lost_peers.pop(uid, frozenset())
        if lost:
            self._lost_peers[uid] = lost
        began_waiting = since == now and self._announced is not None
        storage_changed = heartbeat.unsaved != ("" if before is None else before.unsaved)
        if began_waiting or storage_changed or lost != known:
            self._owner.wake()
        return pause

    async def put_report(self, sender: Identity, report: Report, *, timeout: float) -> None:
        """Takes a report, and returns once the status contains it.

        Raises:
            NotYetDurable: that took longer than `timeout` seconds.
        """
        self._hear(sender)
        if report.newer_than(self._report):
            self._report = report
        self._arrived += 1
        mine = self._arrived
        self._owner.wake()
        async with self._settling:
            try:
                async with asyncio.timeout(timeout):
                    await self._settling.wait_for(lambda: self._settled >= mine)
            except TimeoutError as error:
                raise NotYetDurable(f"the report is not in the job's status after {timeout:g} s") from error

    async def generation_after(self, sender: Identity, after: int, *, timeout: float) -> Announcement | None:
        """The newest generation above `after` that names the sender. None if none came within `timeout` seconds, or
        if `MAX_POLLS` newer polls of the sender wait.

        Raises:
            Ended: the job has ended.
        """
        self._hear(sender)
        try:
            async with asyncio.timeout(timeout):
                # Check again each time: the state may have changed since the poll was woken.
                while not self._has_news(sender, after):
                    if not await self._waited(sender.uid):
                        return None
        except TimeoutError:
            return None
        if self._ended:
            raise Ended("the job has ended")
        return self._announced

    def _has_news(self, sender: Identity, after: int) -> bool:
        return self._ended or (self.layout_generation > after and self.belongs(sender))

    async def _waited(self, uid: str) -> bool:
        """Waits for the next change. Returns False if newer polls of the same worker replaced this one."""
        polls = self._polls.setdefault(uid, [])
        poll: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        polls.append(poll)
        if len(polls) > MAX_POLLS:
            _wake(polls.pop(0), changed=False)
        try:
            return await poll
        finally:
            if poll in polls:
                polls.remove(poll)

    async def _tell(self) -> None:
        """Wakes all polls that the news concerns. The event loop does other work between two batches."""
        uids = self._polls if self._ended or not self._announced else self._announced.uids
        waiting = [poll for uid, polls in self._polls.items() if uid in uids for poll in polls]
        for first in range(0, len(waiting), TOLD_AT_ONCE):
            for poll in waiting[first : first + TOLD_AT_ONCE]:
                _wake(poll, changed=True)
            await asyncio.sleep(0)

    def _hear(self, sender: Identity) -> datetime:
        now = self._clock()
        if now < self._newest:
            self._cap_times(now)
        if now > self._newest + DEAF + timedelta(seconds=self.pulse.beat_seconds) - SHORTEST_PACE:
            self.since = now
        self._newest = self._heard[sender.uid] = now
        return now

    def _cap_times(self, now: datetime) -> None:
        """Caps all times at `now`, because the clock was set back: otherwise a hanging worker would count as heard."""
        self.since = min(self.since, now)
        self._heard = {uid: min(time, now) for uid, time in self._heard.items()}
        for uid, beat in self._beats.items():
            since = beat.waiting_since and min(beat.waiting_since, now)
            self._beats[uid] = replace(beat, time=min(beat.time, now), waiting_since=since)

    def _count(self, *, workers: int, jobs: int) -> None:
        """Tells the pulse how many workers speak. Jobs and pods that have ended do not count."""
        known_workers, known_jobs = self._counted
        self.pulse.add(workers=workers - known_workers, jobs=jobs - known_jobs)
        self._counted = workers, jobs


def _wake(poll: asyncio.Future[bool], *, changed: bool) -> None:
    """Wakes one poll, unless it has ended."""
    if not poll.done():
        poll.set_result(changed)
