"""A worker without torch: it speaks the channel as a trainer does, and its training is a script.

Like a trainer it polls, beats and reports side by side, and repeats what was not acknowledged.
"""

import asyncio
import json
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from .cluster import Exit
from .loop import Process
from .truth import Group, Job

POLL_SECONDS = 20
BYTES_OF_LAYER = 600
_LAST_WORDS_SECONDS = 60.0


class NoAnswer(Exception):
    """The channel did not answer, or refused."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer of the channel."""

    code: int
    body: bytes


class Way(Protocol):
    """The way from a worker to the channel."""

    async def call(self, worker: "Worker", method: str, path: str, body: dict[str, Any] | None) -> Said:
        """Sends one request.

        Raises:
            NoAnswer: nothing came back.
        """
        ...


class Worker:
    """See the module. It is a `Program` of the cluster and a `Peer` of its job.

    Args:
        pod: that it runs in.
        process: its own.
        job: what is true of its job.
        way: to the channel.
        random: of its delays.
    """

    def __init__(self, pod: dict[str, Any], process: Process, job: Job, way: Way, random: Random) -> None:
        metadata = pod["metadata"]
        self.name: str = metadata["name"]
        self.uid: str = metadata["uid"]
        self.namespace: str = metadata["namespace"]
        self.node: str = pod["spec"]["nodeName"]
        self.job_name: str = metadata["labels"]["training.pipetransformer.io/job"]
        self.job = job
        self.alive, self.hangs, self.news = True, False, False
        self.told_to_stop, self.told_to_end = False, False
        self._address = f"{pod['status']['podIP']}:29500"
        self._process = process
        self._way = way
        self._random = random
        self._group: Group | None = None
        self._notice: dict[str, Any] | None = None
        self._seen = 0  #: newest generation that a poll showed
        self._present = 0
        self._committed = 0
        self._waiting_after: int | None = None
        self._lost: list[str] = []
        self._why_broken = ""
        self._beat_now = asyncio.Event()
        self._noticed = asyncio.Event()
        self._report_now = asyncio.Event()
        self._reported: tuple[Any, ...] = ()
        self._report_pace = 5.0
        self._final = False
        self._leads = False
        self._ended = asyncio.Event()

    async def run(self) -> Exit:
        """See `Program`."""
        job = self.job
        await asyncio.sleep(0.3 + 3 * self._random.random())
        job.peers[self.uid] = self
        await self._until_said("POST", "/v1/ready", {"address": self._address})
        for running in (self._poll(), self._beat()):
            self._process.start(running)
        live = self._process.start(self._live())
        ended = self._process.start(self._ended.wait())
        await asyncio.wait({live, ended}, return_when=asyncio.FIRST_COMPLETED)
        if live.done():
            exit_ = live.result()
        else:
            live.cancel()
            exit_ = Exit(0, "")
        for group in list(job.groups.values()):
            if not group.over and self.uid in (*group.members, *group.leavers):
                group.on_death(self, 0.1)
        self.on_killed(silently=False)
        return exit_

    def on_killed(self, *, silently: bool) -> None:
        """See `Program`."""
        if self.alive:
            self.job.on_killed(self, silently=silently)

    def on_told_to_end(self) -> None:
        """See `Program`."""
        self.told_to_end = True

    def hang(self) -> None:
        """Its process does nothing any more."""
        self.hangs = True
        self._process.pause()

    async def _live(self) -> Exit:
        while True:
            notice = await self._next()
            self._present, self.news = notice["layoutGeneration"], False
            group = self._group = self.job.group(notice)
            self._leads = notice["leader"]["uid"] == self.uid
            if self._leads:
                self._process.start(self._lead(group, self._present))
            how = await group.take_part(self)
            self._why_broken = "" if how != "Broken" else "a peer was lost"
            if how in ("Succeeded", "Stopped"):
                return await self._finish(how)
            if group.committed:
                self._committed = self._present
            if how == "Left":
                self._wait_after(self._present)
            elif how == "Broken":
                self._wait_after(self._present, group.lost)
            self._leads = False

    def _wait_after(self, generation: int, lost: list[str] | None = None) -> None:
        self._waiting_after, self._lost = generation, list(dict.fromkeys(lost or []))
        self._beat_now.set()

    async def _next(self) -> dict[str, Any]:
        """The notice of a generation newer than the present one."""
        while self._notice is None or self._notice["layoutGeneration"] <= self._present:
            self._noticed.clear()
            await self._noticed.wait()
        return self._notice

    async def _lead(self, group: Group, number: int) -> None:
        """Gets all members, hands them on, and reports as long as the generation lasts."""
        said = None
        while said is None or said.code != 200:
            said = await self._until_said(
                "GET", f"/v1/generation?after={number - 1}&timeoutSeconds=5&members=true", None
            )
        whole = json.loads(said.body)
        if whole["layoutGeneration"] != number:
            return  # a newer one: the poll shows it, too
        group.tell(whole)
        while not group.committed:
            if group.over or self._present != number:
                return
            await asyncio.sleep(0.1)
        while not group.over and self._present == number:
            await self._report(group, number)
            await self._comes(self._report_now, 1.0)

    async def _report(self, group: Group, number: int, outcome: str | None = None) -> bool:
        """Sends a report if there is news, or if the last is old. Returns whether it was acknowledged."""
        job, loop = self.job, asyncio.get_running_loop()
        boundary, since = job.script.frozen(job.step)
        decisive = (number, boundary, job.durable, outcome)
        if self._reported and self._reported[0] == decisive and loop.time() < self._reported[1] + self._report_pace:
            return True
        report = {
            "jobUid": job.uid,
            "layoutGeneration": number,
            "step": job.step,
            "boundary": boundary,
            "boundaryStep": since,
            "numLayers": job.script.layers,
            "totalSteps": job.script.steps,
            "bytesBudget": job.script.layers * BYTES_OF_LAYER // job.stages,
            "offers": _offers(job.script.layers, boundary),
        }
        if job.durable is not None:
            report["checkpoint"] = {
                "step": job.durable.step,
                "boundary": job.durable.boundary,
                "minStages": job.durable.stages,
                "layoutGeneration": job.durable.generation,
            }
        if outcome is not None:
            report["outcome"] = outcome
        try:
            said = await self._say("POST", "/v1/report", report)
        except NoAnswer:
            return False
        if said.code == 200:
            self._reported = decisive, loop.time()
            job.acknowledged += 1
            self._report_pace = json.loads(said.body).get("nextSeconds") or self._report_pace
        return said.code == 200

    async def _finish(self, how: str) -> Exit:
        """Says the last words, and ends."""
        self._committed = self._present
        group, deadline = self._group, asyncio.get_running_loop().time() + _LAST_WORDS_SECONDS
        assert group is not None
        if self._leads:
            while asyncio.get_running_loop().time() < deadline:
                if await self._report(group, self._present, "Succeeded" if how == "Succeeded" else None):
                    break
                await asyncio.sleep(1.0)
        said: dict[str, object] = {"outcome": how}
        if how == "Stopped":
            said = {"outcome": "Left", "reason": "Stopped"}
            if self.job.durable is not None:
                said["savedStep"] = self.job.durable.step
        return Exit(0, json.dumps(said))

    async def _poll(self) -> None:
        """Asks for newer generations endlessly, and says again that it is ready: another operator may lead."""
        while True:
            try:
                said = await self._say("GET", f"/v1/generation?after={self._seen}&timeoutSeconds={POLL_SECONDS}", None)
            except NoAnswer:
                said = Said(503, b"")
            if said.code == 200:
                notice = json.loads(said.body)
                if notice["layoutGeneration"] > self._seen:
                    self._seen, self._notice = notice["layoutGeneration"], notice
                    self.news = self._seen > self._present
                    self._noticed.set()
                    if self._group is not None:
                        self._group.on_news(self)
            elif said.code != 204:
                await asyncio.sleep(0.5 + self._random.random())
            if not self._committed or self._waiting_after is not None:
                await self._tell("POST", "/v1/ready", {"address": self._address})

    async def _beat(self) -> None:
        while True:
            self._beat_now.clear()
            group = self._group
            if group is not None and group.trains and self.uid in group.members and group.number == self._present:
                self._committed, self._waiting_after, self._lost = self._present, None, []
            beat: dict[str, Any] = {"layoutGeneration": self._committed, "step": self.job.step}
            if self._waiting_after is not None:
                beat |= {
                    "waitingAfter": self._waiting_after,
                    "lostPeers": self._lost[:64],
                    "whyBroken": self._why_broken,
                }
            pause = 1.0
            try:
                said = await self._say("POST", "/v1/heartbeat", beat)
                if said.code == 200:
                    reply = json.loads(said.body)
                    pause = reply.get("nextSeconds") or 2.0
                    self.told_to_stop |= bool(reply.get("stop"))
            except NoAnswer:
                pass
            await self._comes(self._beat_now, pause)

    async def _comes(self, event: asyncio.Event, seconds: float) -> None:
        """Waits for an event, at most so long."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, event.set)
        await event.wait()
        timer.cancel()
        event.clear()

    async def _tell(self, method: str, path: str, body: dict[str, Any]) -> None:
        try:
            await self._say(method, path, body)
        except NoAnswer:
            return

    async def _until_said(self, method: str, path: str, body: dict[str, Any] | None) -> Said:
        """Repeats a request until it is accepted."""
        while True:
            try:
                said = await self._say(method, path, body)
                if said.code < 300:
                    return said
            except NoAnswer:
                pass
            await asyncio.sleep(0.5 + self._random.random())

    async def _say(self, method: str, path: str, body: dict[str, Any] | None) -> Said:
        said = await self._way.call(self, method, path, body)
        if said.code == 410:
            self._ended.set()
            await asyncio.get_running_loop().create_future()  # the process ends
        return said


def _offers(layers: int, boundary: int) -> list[dict[str, int]]:
    """Bytes of the largest stage by number of stages; a frozen layer counts a sixth."""
    total = (layers - boundary) * BYTES_OF_LAYER + boundary * BYTES_OF_LAYER // 6
    return [{"stages": stages, "bytesPerWorker": -(-total // stages)} for stages in (1, 2, 4)]
