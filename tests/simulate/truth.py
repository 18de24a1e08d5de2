"""What is true of one job: which worker holds which layers of which step, and which checkpoint is durable.

Workers meet here in place of torch's process groups. Nothing of the operator is imported: the oracle judges by this.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from .loop import Process

#: After this time without a word a worker's peers give it up, as the trainer's watchdog does.
WATCHDOG_SECONDS = 10.0
#: How long a worker waits for others in a rendezvous.
MEETING_SECONDS = 15.0


class Peer(Protocol):
    """A worker, as its job knows it.

    Attributes:
        name: of its pod.
        uid: of its pod.
        alive: its process exists, hanging or not.
        hangs: its process does nothing.
        news: it knows of a generation newer than its own.
        told_to_stop: the operator told it to leave a checkpoint and end.
        told_to_end: its pod is being deleted.
    """

    name: str
    uid: str
    alive: bool
    hangs: bool
    news: bool
    told_to_stop: bool
    told_to_end: bool


@dataclass(frozen=True, slots=True)
class Script:
    """What the trainers of a job do.

    Attributes:
        layers: of the model.
        steps: to train.
        step_seconds: of each step.
        freezes: layers that are frozen from a step on, by that step.
        saves_every: steps between two checkpoints; 0 without checkpoints.
    """

    layers: int = 12
    steps: int = 20
    step_seconds: float = 1.0
    freezes: tuple[tuple[int, int], ...] = ()
    saves_every: int = 0

    def frozen(self, step: int) -> tuple[int, int]:
        """Frozen layers after a step, and since which step."""
        since, boundary = max((one for one in self.freezes if one[0] <= step), default=(0, 0))
        return boundary, since


@dataclass(frozen=True, slots=True)
class Durable:
    """A checkpoint that outlives all workers."""

    step: int
    boundary: int
    generation: int
    stages: int


@dataclass
class Job:
    """See the module.

    Attributes:
        uid: of the job's object.
        stages: of its first layout.
        script: of its trainers.
        process: in whose context its groups train.
        step: the newest committed step.
        durable: the newest checkpoint.
        held: by worker's UID, the step that it holds and which layers of it.
        peers: all workers that live, by UID.
        done: the model is trained, and its workers said so.
        lost: committed steps that had to be trained again.
        generation: the newest that was committed.
        acknowledged: reports of its leaders that the operator acknowledged.
        problems: what must not have happened.
        on_committed: is told of each step and each checkpoint.
    """

    uid: str
    name: str
    stages: int
    script: Script
    random: Random
    process: Process
    step: int = 0
    durable: Durable | None = None
    held: dict[str, tuple[int, frozenset[int]]] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    groups: dict[tuple[int, str], "Group"] = field(default_factory=dict)
    done: bool = False
    lost: int = 0
    generation: int = 0
    acknowledged: int = 0
    problems: list[str] = field(default_factory=list)
    on_committed: list[Callable[["Job"], None]] = field(default_factory=list)

    def group(self, notice: dict[str, Any]) -> "Group":
        """Where the workers of a generation meet."""
        key = notice["layoutGeneration"], notice["nonce"]
        if key not in self.groups:
            self.groups[key] = Group(self, notice["layoutGeneration"])
        return self.groups[key]

    def covered(self, uids: Iterable[str], step: int) -> bool:
        """Whether these workers together hold all layers of a step."""
        layers: set[int] = set()
        for uid in uids:
            held = self.held.get(uid)
            if held is not None and held[0] == step:
                layers |= held[1]
        return len(layers) == self.script.layers

    def living(self) -> list[str]:
        """UIDs of workers that can still give what they hold."""
        return [uid for uid, peer in self.peers.items() if peer.alive and not peer.hangs and not peer.told_to_end]

    def begin_at(self, uids: list[str]) -> int:
        """The step from which workers train on: the newest that they hold together, otherwise the checkpoint's."""
        steps = sorted({self.held[uid][0] for uid in uids if uid in self.held}, reverse=True)
        durable = self.durable.step if self.durable else 0
        return next((step for step in steps if step >= durable and self.covered(uids, step)), durable)

    def on_killed(self, peer: Peer, *, silently: bool) -> None:
        """A worker's process is gone, and with it what it held."""
        peer.alive = False
        self.peers.pop(peer.uid, None)
        self.held.pop(peer.uid, None)
        for group in list(self.groups.values()):
            group.on_death(peer, WATCHDOG_SECONDS if silently else 0.1)


class Group:
    """The workers of one generation: they meet, move state, train, and part.

    Each worker waits in `take_part` for how the generation ends for it: Left, Broken, Newer, Stopped or Succeeded.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.number = number
        self.committed = False
        self.over = False
        self.members: list[str] = []
        self.leavers: list[str] = []
        self.stages = 1
        self.lost: list[str] = []
        self._job = job
        self._whole: dict[str, Any] | None = None
        self._ends: dict[str, asyncio.Future[str]] = {}
        self._there: dict[str, Peer] = {}
        self._saving: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None

    def tell(self, whole: dict[str, Any]) -> None:
        """The leader knows all members, and hands them on."""
        self._whole = whole
        self.members = [one["uid"] for one in whole["members"]]
        self.leavers = [one["uid"] for one in whole.get("leavers", [])]
        self.stages = whole["stages"]
        self._begin()

    async def take_part(self, peer: Peer) -> str:
        """Waits until the generation ends for this worker. Returns how."""
        if self.over:
            return "Broken"
        loop = asyncio.get_running_loop()
        end: asyncio.Future[str] = loop.create_future()
        self._ends[peer.uid] = end
        self._there[peer.uid] = peer
        loop.call_later(MEETING_SECONDS, self._give_up, peer)
        self._begin()
        try:
            how: str = await end
            return how
        finally:
            self._ends.pop(peer.uid, None)

    def on_news(self, peer: Peer) -> None:
        """The worker knows of a newer generation: before the group runs it leaves at once, and later at a vote."""
        if self._running is None and peer.uid in self._ends:
            self._there.pop(peer.uid, None)
            self._end(peer.uid, "Newer")

    def on_death(self, peer: Peer, noticed_after: float) -> None:
        """A process is gone; its peers notice after some seconds."""
        self._ends.pop(peer.uid, None)
        if peer.uid in self._there:
            del self._there[peer.uid]
            self.lost.append(peer.name)
            if self._running is not None and not self.over:
                asyncio.get_running_loop().call_later(noticed_after, self.break_up)

    def break_up(self) -> None:
        """The connections break: each worker notices, and waits for another generation."""
        if self.over:
            return
        self.over = True
        for task in (self._running, self._saving):
            if task is not None:
                task.cancel()
        for uid in list(self._ends):
            self._end(uid, "Broken")

    @property
    def trains(self) -> bool:
        """Whether it makes steps now."""
        return self.committed and not self.over

    @property
    def ends(self) -> bool:
        """Whether a member's pod is being deleted, or its process is gone and the others have not noticed yet."""
        return any(uid not in self._there or self._there[uid].told_to_end for uid in self.members)

    def _begin(self) -> None:
        """Runs once everybody is there."""
        if self._whole is None or self._running is not None or self.over:
            return
        if {*self.members, *self.leavers} <= self._there.keys():
            self._running = self._job.process.start(self._run())

    def _give_up(self, peer: Peer) -> None:
        """Not all have come in time."""
        if self._running is None and self._there.get(peer.uid) is peer and peer.uid in self._ends:
            if self._whole is not None:
                there = self._there.keys()
                self.lost = [
                    one["name"]
                    for one in (*self._whole["members"], *self._whole.get("leavers", []))
                    if one["uid"] not in there
                ]
            self._there.pop(peer.uid, None)
            self._end(peer.uid, "Broken")

    def _end(self, uid: str, how: str) -> None:
        end = self._ends.get(uid)
        if end is not None and not end.done():
            end.set_result(how)

    def _hanging(self) -> list[Peer]:
        return [peer for uid, peer in self._there.items() if peer.hangs and (uid in self.members or not self.committed)]

    async def _run(self) -> None:
        job = self._job
        await asyncio.sleep(0.1 + job.random.random())
        await self._past_hangs()
        self._commit()
        while not self.over:
            if job.step >= job.script.steps:
                job.done = True
                self._end_all("Succeeded")
                return
            await asyncio.sleep(job.script.step_seconds)
            await self._past_hangs()
            if self.over:
                return
            self._train_one()
            members = [self._there[uid] for uid in self.members if uid in self._there]
            if any(peer.told_to_stop for peer in members):
                await self._stop()
                return
            if any(peer.news for peer in members):
                self._end_all("Newer")
                return

    async def _past_hangs(self) -> None:
        """A worker that hangs holds up all others, until their watchdog breaks the group."""
        waited = 0.0
        while hanging := self._hanging():
            await asyncio.sleep(1.0)
            waited += 1.0
            if waited >= WATCHDOG_SECONDS:
                self.lost += [peer.name for peer in hanging]
                self.break_up()
                await asyncio.sleep(0)

    def _commit(self) -> None:
        """Everybody has what its stage needs; leavers are free."""
        job, script = self._job, self._job.script
        step = job.begin_at([*self.members, *self.leavers])
        if step < job.step:
            if job.covered(job.living(), job.step):
                held = ", ".join(job.peers[uid].name for uid in job.living() if job.held.get(uid, (0,))[0] == job.step)
                job.problems.append(
                    f"copies: generation {self.number} trains from step {step}, although {held} hold step {job.step}"
                )
            job.lost += job.step - step
        if self.number < job.generation:
            job.problems.append(f"order: generation {self.number} was committed after {job.generation}")
        job.step, job.generation = step, self.number
        self.committed = True
        for rank, uid in enumerate(self.members):
            stage = rank % self.stages
            first, last = (script.layers * one // self.stages for one in (stage, stage + 1))
            job.held[uid] = step, frozenset(range(first, last))
        for uid in self.leavers:
            job.held.pop(uid, None)
            self._there.pop(uid, None)
            self._end(uid, "Left")
        for listener in job.on_committed:
            listener(job)
        self._save()

    def _train_one(self) -> None:
        job = self._job
        before = job.script.frozen(job.step)
        job.step += 1
        for uid in self.members:
            job.held[uid] = job.step, job.held[uid][1]
        for listener in job.on_committed:
            listener(job)
        every = job.script.saves_every
        if every and (job.step % every == 0 or job.script.frozen(job.step) != before):
            self._save()

    def _save(self) -> None:
        """Begins a checkpoint of the present step, unless one is being written."""
        if self._job.script.saves_every and (self._saving is None or self._saving.done()):
            self._saving = self._job.process.start(self._write(self._job.step))

    async def _write(self, step: int) -> None:
        await asyncio.sleep(0.3 + 2 * self._job.random.random())
        if self._job.script.frozen(step) != self._job.script.frozen(self._job.step):
            step = self._job.step
            await asyncio.sleep(1.0)
        self._note_durable(step)

    def _note_durable(self, step: int) -> None:
        job = self._job
        boundary, _ = job.script.frozen(step)
        job.durable = Durable(step, boundary, self.number, self.stages)
        for listener in job.on_committed:
            listener(job)

    async def _stop(self) -> None:
        """All leave a checkpoint of the newest step, and end."""
        if self._job.script.saves_every:
            await asyncio.sleep(0.3 + self._job.random.random())
            if self.over:
                return
            self._note_durable(self._job.step)
        self._end_all("Stopped")

    def _end_all(self, how: str) -> None:
        self.over = True
        if self._saving is not None:
            self._saving.cancel()
        for uid in list(self._ends):
            self._end(uid, how)
