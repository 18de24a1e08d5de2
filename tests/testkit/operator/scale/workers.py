"""Workers that only speak: each beats, asks and reports as a trainer does, at the pace that the operator asks for.

All live in one process. What trainers agree on among themselves is shared memory here: the leader hands a generation
on to its peers (in reality by its store), and a checkpoint is durable as soon as it is wanted.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from pipetransformer_contract.messages import (
    DurableCheckpoint,
    Generation,
    GenerationNotice,
    Heartbeat,
    Offer,
    Ready,
    Report,
)
from pipetransformer_contract.wire import ChannelPath, Wire

from .request import ChannelClient, Line, Refused

POLL_SECONDS = 20
REPORT_SECONDS = 5.0
HEARTBEAT_SECONDS = 2.0
RETRY_SECONDS = 1.0
ENDED = 410
BLOCKS = 16
BYTES_PER_BLOCK = 100


class JobEnded(Exception):
    """The channel says so."""


@dataclass
class Counts:
    """What all workers did and got.

    Attributes:
        beats: heartbeats that were answered.
        refused: by status code or error, what was not served; such a request is sent again.
        slow: seconds of the heartbeats.
    """

    beats: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    slow: list[float] = field(default_factory=list)


class Job:
    """What the workers of one job share.

    Attributes:
        boundary: frozen blocks.
        confirmed: the newest generation that the leader reported, and that is durable.
        learned: when the leader learned of the newest generation, by `time.monotonic`.
    """

    def __init__(self, namespace: str, name: str, uid: str, stages: int) -> None:
        self.key = f"{namespace}/{name}"
        self.uid = uid
        self.stages = stages
        self.boundary = 0
        self.boundary_step = 0
        self.step = 0
        self.generation: Generation | None = None
        self.confirmed = 0
        self.learned = 0.0
        self.frozen = asyncio.Event()
        self.changed = asyncio.Condition()

    async def meet(self, generation: Generation) -> None:
        """The leader has learned of the generation: its peers do."""
        async with self.changed:
            if self.generation is None or generation.layout_generation > self.generation.layout_generation:
                self.generation = generation
            self.changed.notify_all()

    def freeze(self, boundary: int) -> None:
        """The next blocks are frozen; the leader reports it."""
        self.boundary, self.boundary_step = boundary, self.step
        self.frozen.set()

    def report(self) -> Report:
        """All that the leader knows."""
        assert self.generation is not None
        halvings = [self.stages >> shift for shift in range(self.stages.bit_length())]
        active = BLOCKS - self.boundary
        return Report(
            job_uid=self.uid,
            layout_generation=self.generation.layout_generation,
            step=self.step,
            boundary=self.boundary,
            boundary_step=self.boundary_step,
            num_layers=BLOCKS,
            bytes_budget=-(-BLOCKS // self.stages) * BYTES_PER_BLOCK,
            offers=[Offer(stages=k, bytes_per_worker=-(-active // k) * BYTES_PER_BLOCK) for k in halvings],
            checkpoint=DurableCheckpoint(step=self.boundary_step, boundary=self.boundary, min_stages=1),
        )


class Worker:
    """One worker of a job; `live` returns when it has left or the job has ended.

    Args:
        job: that it belongs to.
        name: of its pod.
        uid: of its pod.
        address: of its pod.
        token: of its pod.
        channel: to the operator.
        counts: of all workers.
    """

    def __init__(
        self, job: Job, name: str, uid: str, address: str, token: str, channel: ChannelClient, counts: Counts
    ) -> None:
        self._job = job
        self._name = name
        self._uid = uid
        self._address = address
        self._sender = f"127.{address.partition('.')[2]}"
        self._channel = channel
        self._counts = counts
        self._committed = 0
        self._headers = {
            "Authorization": f"Bearer {token}",
            "X-Pipetransformer-Job": job.key,
            "X-Pipetransformer-Worker": name,
        }

    async def live(self) -> None:
        """Beats from the start on, joins, trains and leaves."""
        beating = asyncio.create_task(self._beat())
        try:
            generation = await self._join()
            while self._uid in {member.uid for member in generation.members}:
                self._committed = generation.layout_generation
                lead = generation.leader == self._name
                generation = await (self._lead() if lead else self._follow(self._committed + 1))
        except JobEnded:
            return
        finally:
            beating.cancel()

    async def _join(self) -> Generation:
        """The first generation: from the channel for its leader, else from that."""
        notice = GenerationNotice.model_validate(await self._poll("after=0"))
        if notice.leader.name != self._name:
            return await self._follow(notice.layout_generation)
        return await self._learn(0)

    async def _learn(self, after: int) -> Generation:
        """The next generation, for its leader or the present one, which hands it on."""
        generation = Generation.model_validate(await self._poll(f"after={after}&members=true"))
        await self._job.meet(generation)
        return generation

    async def _poll(self, query: str) -> Any:
        path = f"{ChannelPath.GENERATION}?{query}&timeoutSeconds={POLL_SECONDS}"
        async with self._channel.line(self._sender) as line:
            while True:
                await self._call(line, "POST", ChannelPath.READY, Ready(address=f"{self._address}:29400"))
                if answer := await self._call(line, "GET", path, timeout=POLL_SECONDS + 10):
                    return answer

    async def _follow(self, number: int) -> Generation:
        """The generation of that number, or a newer one, once the leader hands it on."""
        job = self._job
        async with job.changed:
            await job.changed.wait_for(
                lambda: job.generation is not None and job.generation.layout_generation >= number
            )
            assert job.generation is not None
            return job.generation

    async def _lead(self) -> Generation:
        job = self._job
        reporting = asyncio.create_task(self._report())
        try:
            newer = await self._learn(self._committed)
            job.learned = time.monotonic()
            return newer
        finally:
            reporting.cancel()

    async def _report(self) -> None:
        job = self._job
        while True:
            job.frozen.clear()
            job.step += 1
            report = job.report()
            async with self._channel.line(self._sender) as line:
                answer = await self._call(line, "POST", ChannelPath.REPORT, report, timeout=30)
            job.confirmed = max(job.confirmed, report.layout_generation)
            pause = answer.get("nextSeconds", REPORT_SECONDS)
            try:
                async with asyncio.timeout(pause):
                    await job.frozen.wait()
            except TimeoutError:
                continue

    async def _beat(self) -> None:
        pause = HEARTBEAT_SECONDS
        while True:
            await asyncio.sleep(pause * random.uniform(0.9, 1.0))
            started = time.monotonic()
            beat = Heartbeat(layout_generation=self._committed)
            try:
                async with self._channel.line(self._sender) as line:
                    answer = await self._call(line, "POST", ChannelPath.HEARTBEAT, beat)
            except JobEnded:
                return
            self._counts.beats += 1
            self._counts.slow.append(time.monotonic() - started)
            pause = answer.get("nextSeconds", HEARTBEAT_SECONDS)

    async def _call(self, line: Line, method: str, path: str, message: Wire | None = None, timeout: float = 10) -> Any:
        wait = RETRY_SECONDS
        while True:
            try:
                body = message.to_wire() if message else None
                return await line.send(method, path, self._headers, body, timeout)
            except Refused as error:
                if error.code == ENDED:
                    raise JobEnded from error
                self._count(str(error.code))
                await asyncio.sleep(max(wait, error.retry_after))
            except OSError as error:
                self._count(type(error).__name__)
                await asyncio.sleep(wait)
            wait = min(2 * wait, 10.0)

    def _count(self, why: str) -> None:
        self._counts.refused[why] = self._counts.refused.get(why, 0) + 1
