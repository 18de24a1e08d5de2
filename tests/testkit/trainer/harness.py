"""Runs real workers as processes, with generations from a script instead of an operator.

Workers start from a forkserver that has imported torch already. The script publishes a generation once the leader of
the present one has committed a given number of steps, or once a worker is lost; everything else (rendezvous, groups,
transfer) is the real thing.
"""

import contextlib
import datetime
import faulthandler
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

from pipetransformer.hooks import HookPoint
from pipetransformer.job.script_parts import Parts
from pipetransformer_contract.messages import Generation, Member, Report, ResizeReason
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit import forked
from tests.testkit.trainer.devices import watchdog_floor

#: Of the workers' collectives and rendezvous, where no watchdog comes before it and a test says no other.
CONNECTION_TIMEOUT = datetime.timedelta(seconds=60)
_BROKE = "broke"
_WENT_BACK = "went-back.jsonl"


@dataclass(frozen=True)
class Scripted:
    """A generation to publish after `at_step` committed steps, or once worker `after_loss` is lost. Workers are
    numbers; the first member leads."""

    stages: int
    pipelines: int
    members: Sequence[int]
    at_step: int = 0
    leavers: Sequence[int] = ()
    after_loss: int | None = None


@dataclass(frozen=True)
class Faults:
    """What goes wrong in one worker.

    Attributes:
        killed_at: the process dies at that point of that step (from 0) or generation.
        stopped_at: it hangs there for ever. Nobody is told before another worker has lost its group: the operator
            drops nobody for silence alone.
        loses_vote_of: its connection seems to break after the vote of that step (from 0), before its commit.
        loses_decision_after: it seems to break after the commit of that step, before what follows it.
        loses_commit_of: it seems to break in the vote for that generation, for which all have voted.
        killed_in_level_change: the process dies at that point of the level change after so many committed steps.
        loses_level_change: its connection seems to break in the vote for the level change after so many steps.
        outdated_level_change: in the level change after so many steps, the generation of the next step is published.
            The watchdog then ends the change.
        outdated_at: the point of the change when that happens: before its plan (`MET`), or after its vote (`AGREED`).
        keeps_once_broken: it writes no weights of a level before its generation has broken.
        stopped_while_keeping: its storage takes no weights of a level, and it is told to stop.
        notes_read_ahead: it makes that file once it has read frozen units ahead.
        awaits: that step (from 0) ends only once there is that file.
    """

    killed_at: tuple[HookPoint, int] | None = None
    stopped_at: tuple[HookPoint, int] | None = None
    loses_vote_of: int | None = None
    loses_decision_after: int | None = None
    loses_commit_of: int | None = None
    killed_in_level_change: tuple[HookPoint, int] | None = None
    loses_level_change: int | None = None
    outdated_level_change: int | None = None
    outdated_at: HookPoint = HookPoint.MET
    keeps_once_broken: bool = False
    stopped_while_keeping: bool = False
    notes_read_ahead: Path | None = None
    awaits: tuple[int, Path] | None = None

    @property
    def dies(self) -> bool:
        """Whether its process ends."""
        return self.killed_at is not None or self.killed_in_level_change is not None

    @property
    def ends(self) -> bool:
        """Whether this worker is lost."""
        return self.dies or self.stopped_at is not None


@dataclass(frozen=True)
class Published:
    """A generation, and when a worker may see it."""

    generation: Generation
    at_step: int
    after_loss: int | None

    def names(self, worker: str) -> bool:
        return any(member.name == worker for member in [*self.generation.members, *self.generation.leavers])


class ScriptedSource:
    """Generations from a list; a worker sees those that name it, after their step or their loss."""

    def __init__(self, worker: str, published: Sequence[Published]) -> None:
        self._published = [entry for entry in published if entry.names(worker)]
        self._condition = threading.Condition()
        self._step = 0
        self._is_member = False
        self._lost: set[int] = set()
        self._closed = False

    def stepped(self, step: int) -> None:
        with self._condition:
            self._step = step
            self._condition.notify_all()

    def joined(self) -> None:
        with self._condition:
            self._is_member = True

    def lose(self, worker: int) -> None:
        with self._condition:
            self._lost.add(worker)
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
        with self._condition:
            return max((e.generation.layout_generation for e in self._published if self._is_out(e)), default=0)

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _is_out(self, entry: Published) -> bool:
        return self._step >= entry.at_step if entry.after_loss is None else entry.after_loss in self._lost

    def _visible(self, after: int) -> Generation | None:
        newer = [entry for entry in self._published if entry.generation.layout_generation > after]
        out = [entry for entry in newer if self._is_out(entry)]
        if out:
            return out[-1].generation
        # A worker that has never been a member waits in the rendezvous for the others.
        return newer[0].generation if newer and not self._is_member else None


class Reports:
    """A reporter that acknowledges everything and remembers it."""

    def __init__(self) -> None:
        self.sent: list[Report] = []

    def submit(self, report: Report, *, urgent: bool) -> None:
        self.sent.append(report)

    def flush(self, timeout: float | None = None) -> bool:
        return True


class Usage(NamedTuple):
    """What a process used at one moment; `memory` is in bytes."""

    generation: int
    memory: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls, generation: int) -> "Usage":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        tasks = len(list(Path("/proc/self/task").iterdir()))
        return cls(generation, pages * os.sysconf("SC_PAGESIZE"), len(list(Path("/proc/self/fd").iterdir())), tasks)


@dataclass
class Ran:
    """What a run left behind.

    Attributes:
        endings: how each worker ended that was not lost.
        lost_at: seconds since the epoch when each of the others was.
        usage: what each worker used after each round.
    """

    run_dir: Path
    endings: dict[int, str] = field(default_factory=dict)
    lost_at: dict[int, float] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    usage: dict[int, list["Usage"]] = field(default_factory=dict)

    @property
    def steps(self) -> list[dict[str, Any]]:
        lines = (self.run_dir / "steps.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind, in order."""
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    @property
    def went_back(self) -> list[dict[str, bool]]:
        """What each worker found that went back to the start of a round of several steps (`round_starts.watch`)."""
        path = self.run_dir / _WENT_BACK
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return content


def _worker(
    number: int,
    spec_json: str,
    run_dir: str,
    pipe: Connection,
    faults: Faults,
    watchdog_seconds: float,
    connection_timeout: datetime.timedelta,
    checks_model: bool,
    parts: Parts,
    environment: Mapping[str, str],
) -> None:
    forked.begin()
    faulthandler.enable()
    os.environ.update(environment)
    import logging
    from unittest import mock

    import torch

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format=f"w{number} %(asctime)s %(message)s")
    from pipetransformer.checkpoint.prefetch import Prefetcher
    from pipetransformer.checkpoint.resume import in_order_of_checkpoint
    from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, host_store
    from pipetransformer.elastic.generations.watcher import GenerationWatcher
    from pipetransformer.elastic.regroup import transaction as regroup_module
    from pipetransformer.elastic.transport.exchange import Exchange
    from pipetransformer.elastic.transport.groups import Transport
    from pipetransformer.elastic.transport.watchdog import Watchdog
    from pipetransformer.hooks import Hooks
    from pipetransformer.job.load import load_job
    from pipetransformer.storage import save_unit
    from pipetransformer.worker.trainer import Trainer
    from tests.testkit.trainer import round_starts
    from tests.testkit.trainer.devices import choose_device
    from tests.testkit.trainer.storing import until

    round_starts.watch(Path(run_dir) / _WENT_BACK)
    if not checks_model:
        mock.patch("pipetransformer.worker.warm_up._check_dropout").start()
    try:
        spec, num_shards = in_order_of_checkpoint(TrainerSpec.model_validate_json(spec_json))
        job = load_job(spec, parts, num_shards=num_shards)
        store, address = host_store("127.0.0.1", connection_timeout)
        pipe.send(address)
        name = f"job-w{number}"
        source = ScriptedSource(name, pipe.recv())
        handler = GenerationRendezvousHandler(name, store, source, timeout=connection_timeout)
        reports = Reports()
        over, broken, told_to_stop = threading.Event(), threading.Event(), threading.Event()
        usage: list[Usage] = []

        def listen() -> None:
            """Take the numbers of lost workers, and None at the end."""
            while (lost := pipe.recv()) is not None:
                source.lose(lost)
            over.set()

        class Injecting(Hooks):
            """Makes this worker fail as it is told."""

            def on_broken(self) -> None:
                pipe.send(_BROKE)
                broken.set()

            def stop_requested(self) -> bool:
                return told_to_stop.is_set()

            def on_point(self, point: HookPoint, number: int) -> None:
                if point is HookPoint.AGREED:
                    source.joined()
                if point is HookPoint.ENDED:
                    if faults.awaits is not None and number == faults.awaits[0]:
                        until(faults.awaits[1].exists)
                    source.stepped(number + 1)
                    usage.append(Usage.now(trainer.generation))
                changes = number == trainer.generation and (point, trainer.step) == faults.killed_in_level_change
                if changes or (point, number) in (faults.killed_at, faults.stopped_at):
                    pipe.send(time.time())
                    os.kill(os.getpid(), signal.SIGKILL if faults.dies else signal.SIGSTOP)
                changes = point is faults.outdated_at and number == trainer.generation
                if changes and trainer.step == faults.outdated_level_change:
                    source.stepped(trainer.step + 1)
                    assert handler.is_superseded()
                    if point is HookPoint.MET:
                        raise RuntimeError("injected: connection shut by the watchdog")
                    until(lambda: trainer._is_shut)
                loses = {HookPoint.VOTED: faults.loses_vote_of, HookPoint.COMMITTED: faults.loses_decision_after}
                if point in loses and number == loses[point] and trainer.generation == 1:
                    raise RuntimeError("injected: connection closed by peer")

        class Prompt(GenerationWatcher):
            """Has found what is published by the time that it is asked, however long its thread waits for a processor.
            So a generation always begins after the same step."""

            def found(self, after: int) -> Generation | None:
                until(lambda: super(Prompt, self).found(after) is not None or source.newest() <= after)
                return super().found(after)

        def vote_for_generation(participants: Exchange) -> None:
            commit(participants)
            if handler.current == faults.loses_commit_of or (
                trainer.generation == handler.current and trainer.step == faults.loses_level_change
            ):
                raise RuntimeError("injected: connection closed by peer")

        def save_late(*arguments: Any, **named: Any) -> None:
            if faults.stopped_while_keeping:
                told_to_stop.set()
                raise TimeoutError("injected: the storage is away")
            assert not faults.keeps_once_broken or broken.wait(60)
            save_unit(*arguments, **named)

        def look_and_note(prefetcher: Prefetcher) -> None:
            look(prefetcher)
            if prefetcher.units and faults.notes_read_ahead is not None:
                faults.notes_read_ahead.touch()

        look = Prefetcher.look
        mock.patch.object(Prefetcher, "look", look_and_note).start()
        mock.patch("pipetransformer.checkpoint.weights_saving.save_unit", save_late).start()
        commit = regroup_module._commit
        regroup_module._commit = vote_for_generation
        threading.Thread(target=listen, daemon=True).start()
        watchdog = Watchdog(floor_seconds=watchdog_seconds)
        transport = Transport("127.0.0.1", connection_timeout, choose_device(number))
        watcher = Prompt(source.next_generation)
        trainer = Trainer(job, name, handler, watcher, transport, reports, Path(run_dir), Injecting(), watchdog)
        ending = trainer.run()
        pipe.send((ending.value, [report.model_dump_json() for report in reports.sent], usage))
        over.wait()  # the store that this worker hosts serves the others until all have ended
    except BaseException:
        pipe.send((traceback.format_exc(), [], []))
        raise


def run_job(
    spec: TrainerSpec,
    script: Sequence[Scripted],
    run_dir: Path,
    *,
    faults: Mapping[int, Faults] | None = None,
    first_generation: int = 1,
    job_uid: str = "job",
    watchdog_seconds: float | None = None,
    connection_timeout: datetime.timedelta = CONNECTION_TIMEOUT,
    parts: Parts | None = None,
    environment: Mapping[str, str] | None = None,
    patience_seconds: float = 100.0,
) -> Ran:
    """Train `spec` through the generations of `script`, with `faults` by worker.

    Args:
        spec: of the job.
        script: its generations.
        run_dir: for the record.
        faults: by worker.
        first_generation: number of the script's first.
        job_uid: of the job; another one's is a new job.
        watchdog_seconds: floor of the workers' watchdogs; by default that of `devices`.
        connection_timeout: of the workers' collectives and rendezvous.
        parts: what the program passes.
        environment: of all workers, besides that of the tests.
        patience_seconds: how long no worker may end, or lose its group, before this gives up.
    """
    faults, parts = faults or {}, parts or Parts()
    context = forked.context(*forked.TRAINER)
    numbers = sorted({number for entry in script for number in [*entry.members, *entry.leavers]})
    pipes: dict[int, Connection] = {}
    processes: dict[int, ForkServerProcess] = {}
    for number in numbers:
        pipes[number], theirs = context.Pipe()
        processes[number] = context.Process(
            target=_worker,
            args=(
                number,
                spec.model_dump_json(by_alias=True),
                str(run_dir),
                theirs,
                faults.get(number, Faults()),
                watchdog_floor() if watchdog_seconds is None else watchdog_seconds,
                connection_timeout,
                number == numbers[0],  # all hold the same model, and each would take a tenth of its time
                parts,
                environment or {},
            ),
        )
        processes[number].start()
        theirs.close()
    try:
        members = {number: Member(name=f"job-w{number}", uid=f"u{number}", address=_receive(pipes[number]))
                   for number in numbers}  # fmt: skip
        published = [
            Published(
                Generation(
                    job_uid=job_uid,
                    layout_generation=first_generation + index,
                    stages=entry.stages,
                    pipelines=entry.pipelines,
                    members=[members[number] for number in entry.members],
                    leavers=[members[number] for number in entry.leavers],
                    leader=members[entry.members[0]].name,
                    nonce="n",
                    reason=ResizeReason.START if index == 0 else ResizeReason.PACK,
                ),
                entry.at_step,
                entry.after_loss,
            )
            for index, entry in enumerate(script)
        ]
        for number in numbers:
            pipes[number].send(published)
        return _follow(Ran(run_dir), pipes, processes, faults, patience_seconds)
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _follow(
    ran: Ran,
    pipes: Mapping[int, Connection],
    processes: Mapping[int, ForkServerProcess],
    faults: Mapping[int, Faults],
    patience_seconds: float,
) -> Ran:
    """Collect how the workers end, and tell the others of each that is lost."""
    running = dict(pipes)
    silent: list[int] = []
    broke = False

    def tell(lost: int) -> None:
        for pipe in pipes.values():
            with contextlib.suppress(OSError):
                pipe.send(lost)

    while running:
        heard = wait(list(running.values()), timeout=patience_seconds)
        if not heard:
            for process in processes.values():
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGABRT)  # it prints where its threads are
                    process.join(10)
            raise TimeoutError(f"workers {sorted(running)} said nothing for {patience_seconds:g} s")
        for number in [number for number, pipe in running.items() if pipe in heard]:
            said = running[number].recv()
            if said == _BROKE:
                broke = True
            elif isinstance(said, tuple):
                ran.endings[number] = said[0]
                ran.reports += [Report.model_validate_json(content) for content in said[1]]
                ran.usage[number] = said[2]
                del running[number]
            else:
                ran.lost_at[number] = said
                del running[number]
                if faults[number].dies:
                    processes[number].join(60)
                    tell(number)
                else:
                    silent.append(number)
        while broke and silent:
            tell(silent.pop())
    for pipe in pipes.values():
        with contextlib.suppress(OSError):
            pipe.send(None)
    return ran


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(120):
        raise TimeoutError("a worker said nothing for 120 s")
    return pipe.recv()
