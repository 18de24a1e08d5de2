"""Runs real workers as processes, with generations from a script instead of an operator.

Workers start from a forkserver that has imported torch already. The script publishes a generation once the leader of
the present one has committed a given number of steps; everything else (rendezvous, groups, transfer) is the real thing.
"""

import datetime
import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipetransformer_contract.messages import Generation, Member, Report, ResizeReason
from pipetransformer_contract.spec import TrainerSpec

_TIMEOUT = datetime.timedelta(seconds=60)


@dataclass(frozen=True)
class Scripted:
    """A generation to publish after `at_step` committed steps. Workers are numbers; the first member leads."""

    stages: int
    pipelines: int
    members: Sequence[int]
    at_step: int = 0
    leavers: Sequence[int] = ()


@dataclass(frozen=True)
class Faults:
    """What goes wrong in one worker.

    Attributes:
        killed_after: the process dies once it has committed that many steps.
        loses_vote_of: its connection seems to break after the vote of that step (from 0), before its commit.
    """

    killed_after: int | None = None
    loses_vote_of: int | None = None


class ScriptedSource:
    """Generations from a list; a worker sees those that name it, the leader only after their step."""

    def __init__(self, worker: str, generations: Sequence[Generation], at_steps: Mapping[int, int]) -> None:
        self._worker = worker
        self._generations = generations
        self._at_steps = at_steps
        self._condition = threading.Condition()
        self._step = 0
        self._closed = False

    def stepped(self, step: int) -> None:
        with self._condition:
            self._step = step
            self._condition.notify_all()

    def next_generation(self, after: int) -> Generation:
        from torch.distributed.elastic.rendezvous import RendezvousClosedError

        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._visible(after) is not None)
            found = self._visible(after)
        if found is None:
            raise RendezvousClosedError
        return found

    def newest(self) -> int:
        return 0

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _visible(self, after: int) -> Generation | None:
        for generation in self._generations:
            names = [member.name for member in [*generation.members, *generation.leavers]]
            if generation.layout_generation <= after or self._worker not in names:
                continue
            # A worker that has never been a member waits in the rendezvous for the others.
            if after > 0 and self._step < self._at_steps[generation.layout_generation]:
                return None
            return generation
        return None


class Reports:
    """A reporter that acknowledges everything and remembers it."""

    def __init__(self) -> None:
        self.sent: list[Report] = []

    def submit(self, report: Report, *, urgent: bool) -> None:
        self.sent.append(report)

    def flush(self, timeout: float | None = None) -> bool:
        return True


@dataclass
class Ran:
    """What a run left behind."""

    run_dir: Path
    endings: dict[int, str]
    reports: list[Report] = field(default_factory=list)

    @property
    def steps(self) -> list[dict[str, Any]]:
        lines = (self.run_dir / "steps.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return content


def _worker(
    number: int, spec_json: str, run_dir: str, at_steps: Mapping[int, int], pipe: Connection, faults: Faults
) -> None:
    import logging

    import torch

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format=f"w{number} %(asctime)s %(message)s")
    from pipetransformer.elastic.groups import Transport
    from pipetransformer.elastic.rendezvous import GenerationRendezvousHandler, host_store
    from pipetransformer.elastic.watcher import GenerationWatcher
    from pipetransformer.job import Job
    from pipetransformer.trainer import Hooks, Trainer

    try:
        job = Job.load(TrainerSpec.model_validate_json(spec_json))
        store, address = host_store("127.0.0.1", _TIMEOUT)
        pipe.send(address)
        generations = [Generation.model_validate_json(content) for content in pipe.recv()]
        name = f"job-w{number}"
        source = ScriptedSource(name, generations, at_steps)
        handler = GenerationRendezvousHandler(name, store, source, timeout=_TIMEOUT)
        reports = Reports()

        def stepped(step: int) -> None:
            source.stepped(step)
            if step == faults.killed_after:
                os.kill(os.getpid(), signal.SIGKILL)

        def voted(step: int) -> None:
            if step == faults.loses_vote_of and trainer.generation == 1:
                raise RuntimeError("injected: connection closed by peer")

        trainer = Trainer(
            job, name, handler, GenerationWatcher(source), Transport("127.0.0.1", _TIMEOUT), reports, Path(run_dir),
            Hooks(voted=voted, stepped=stepped),
        )  # fmt: skip
        ending = trainer.run()
        pipe.send((ending.value, [report.model_dump_json() for report in reports.sent]))
        pipe.recv()  # the store that this worker hosts serves the others until all have ended
    except BaseException:
        pipe.send((traceback.format_exc(), []))
        raise


def run_job(
    spec: TrainerSpec,
    script: Sequence[Scripted],
    run_dir: Path,
    *,
    faults: Mapping[int, Faults] | None = None,
    first_generation: int = 1,
) -> Ran:
    """Train `spec` through the generations of `script`, with `faults` by worker."""
    faults = faults or {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipetransformer.trainer", "sklearn.datasets", "matplotlib.pyplot"])
    numbers = sorted({number for entry in script for number in [*entry.members, *entry.leavers]})
    at_steps = {first_generation + index: entry.at_step for index, entry in enumerate(script)}
    pipes: dict[int, Connection] = {}
    processes = {}
    for number in numbers:
        pipes[number], theirs = context.Pipe()
        processes[number] = context.Process(
            target=_worker,
            args=(
                number,
                spec.model_dump_json(by_alias=True),
                str(run_dir),
                at_steps,
                theirs,
                faults.get(number, Faults()),
            ),
        )
        processes[number].start()
        theirs.close()
    try:
        members = {number: Member(name=f"job-w{number}", uid=f"u{number}", address=_receive(pipes[number]))
                   for number in numbers}  # fmt: skip
        documents = [
            Generation(
                job_uid="job",
                layout_generation=first_generation + index,
                stages=entry.stages,
                pipelines=entry.pipelines,
                members=[members[number] for number in entry.members],
                leavers=[members[number] for number in entry.leavers],
                leader=members[entry.members[0]].name,
                nonce="n",
                reason=ResizeReason.START if index == 0 else ResizeReason.PACK,
            ).model_dump_json(by_alias=True)
            for index, entry in enumerate(script)
        ]
        for number in numbers:
            pipes[number].send(documents)
        endings: dict[int, str] = {}
        reports: list[Report] = []
        for number in numbers:
            if number in faults and faults[number].killed_after is not None:
                processes[number].join(60)
                continue
            ending, sent = _receive(pipes[number])
            endings[number] = ending
            reports += [Report.model_validate_json(content) for content in sent]
        return Ran(run_dir, endings, reports)
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(120):
        raise TimeoutError("a worker said nothing for 120 s")
    return pipe.recv()
