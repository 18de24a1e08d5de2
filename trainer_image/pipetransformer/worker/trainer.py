"""Trains as one worker, through all generations of its job.

A round trains one global batch (`training.round`). Everything else (freeze, evaluation, checkpoint, regroup) happens
between rounds, and all workers decide it alike from the vote. When the group breaks, the worker keeps its state, drops
the group and waits for the next generation.
"""

import contextlib
import gc
import logging
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from pipetransformer.callbacks.callback import Teller
from pipetransformer.checkpoint.checkpointer import Checkpointer
from pipetransformer.data import Readers
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler
from pipetransformer.elastic.generations.watcher import GenerationWatcher
from pipetransformer.elastic.regroup.agreement import RegroupError
from pipetransformer.elastic.regroup.mirrors import Mirrors
from pipetransformer.elastic.regroup.tools import RegroupTools
from pipetransformer.elastic.regroup.transaction import Regrouped, regroup
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import Transport
from pipetransformer.elastic.transport.watchdog import ROUND, Watchdog
from pipetransformer.errors import fault_of
from pipetransformer.freeze import PolicyCopy
from pipetransformer.hooks import HookPoint, Hooks
from pipetransformer.job.job import Job
from pipetransformer.metrics import Meter, Position
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.after_step import is_done, stages_too_few
from pipetransformer.training.between_rounds import BetweenRounds
from pipetransformer.training.cache_handover import WorkerCache
from pipetransformer.training.clock import wall_clock
from pipetransformer.training.commit import Committer
from pipetransformer.training.kit import Kit
from pipetransformer.training.leader import Leader
from pipetransformer.training.leader_events import GenerationBegun
from pipetransformer.training.leader_reports import Offered, ReportSink
from pipetransformer.training.membership import Membership, drop_all
from pipetransformer.training.round import Rounds
from pipetransformer.training.vote import Vote
from pipetransformer.training.worker_memory import host_apart, usable_bytes
from pipetransformer_contract.messages import ResizeReason

from .visits import Instead, Visits
from .warm_up import warm_up

logger = logging.getLogger(__name__)


class Ending(Enum):
    """How a worker's part in its job ended, without an error."""

    FINISHED = "Finished"  #: the job's last step is done and the model is durable
    LEFT = "Left"  #: a generation was committed without this worker
    CLOSED = "Closed"  #: the job has ended without this worker
    STOPPED = "Stopped"  #: this worker was told to stop


class Trainer:
    """One worker of a job. `run` returns when its part has ended."""

    def __init__(
        self,
        job: Job,
        worker: str,
        handler: GenerationRendezvousHandler,
        watcher: GenerationWatcher,
        transport: Transport,
        reports: ReportSink,
        run_dir: Path,
        hooks: Hooks | None = None,
        watchdog: Watchdog | None = None,
        meter: Meter | None = None,
    ) -> None:
        hooks, watchdog, meter = hooks or Hooks(), watchdog or Watchdog(), meter or Meter()
        mirror = job.spec.mirror
        self._job = job
        self._kit = Kit(
            job=job,
            handler=handler,
            watcher=watcher,
            transport=transport,
            reports=reports,
            run_dir=run_dir,
            hooks=hooks,
            watchdog=watchdog,
            meter=meter,
            committer=Committer(job, worker, run_dir, hooks),
            cache=WorkerCache(job, worker, run_dir, meter),
            checkpointer=Checkpointer(job, hooks),
            mirrors=Mirrors(None if mirror is None else mirror.every_steps, job.codec, job.shells, transport.device),
            readers=Readers.of(job.dataset, job.spec.data.loader_processes),
            teller=Teller(job.callbacks),
            barrier=Barrier(watchdog),
            usable_bytes=usable_bytes(transport.device),
            host_apart=host_apart(transport.device),
        )
        self._prefetcher = self._kit.checkpointer.prefetcher()
        self._rounds = Rounds(self._kit)
        self._between = BetweenRounds(self._kit)
        self._visits = Visits(self._kit, self._rounds, self._between)
        self._tools = self._make_tools()
        self._policy = self._policy_at({})
        self._state = WorkerState(job.num_layers, job.model.ties)
        self._offered = Offered()
        self._member: Membership | None = None
        self._broken = 0
        #: Why the newest generation broke or was not committed; empty if it is whole.
        self.why_broken = ""

    @property
    def step(self) -> int:
        """Steps committed so far."""
        return self._state.control.step

    @property
    def control(self) -> Control:
        """The control state, which is the same on all workers."""
        return self._state.control

    @property
    def generation(self) -> int:
        """The generation that this worker is a member of, 0 for none."""
        return 0 if self._member is None else self._member.layout.number

    @property
    def position(self) -> Position:
        """Where this worker stands. Any thread may ask."""
        member = self._member
        leader = None if member is None else member.leader
        return Position(
            control=self._state.control,
            layout=None if member is None else member.layout,
            num_layers=self._job.at(self._state.control.visit).num_layers,
            level=self._job.at(self._state.control.visit).level,
            idle_share=None if leader is None else leader.idle_share,
        )

    @property
    def stages_too_few(self) -> int | None:
        """The number of stages that was too small for this worker's memory; None if it may be enough after all."""
        member = self._member
        generation = self._kit.handler.generation if member is None else member.layout.generation
        first_step = self.step if member is None else member.first_step
        if generation is None:  # in the warm-up
            return None
        return stages_too_few(self._job, self._state.control, generation.stages, first_step)

    @property
    def lost_peers(self) -> list[str]:
        """All other workers of the newest generation if it broke, because a connection does not tell which peer it
        lost; the operator knows which of them still send heartbeats. Those that follow this worker come first, in case
        the list is cut."""
        return self._kit.handler.others if self._broken == self._kit.handler.current else []

    @property
    def committed_generation(self) -> int:
        """The newest generation that this worker has committed as a member, 0 for none. Its group may have broken."""
        layout = self._kit.committer.layout
        return 0 if layout is None else layout.number

    def run(self, *, warm: bool = False) -> Ending:
        """Train until the job ends or this worker leaves.

        Args:
            warm: whether this process has trained before, so that it needs no warm-up.

        Raises:
            ModelError: the model failed.
            DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
            SpecError: the training diverged, or the freeze policy failed.
            StorageError: a checkpoint or the model cannot be written.
            CallbackError: a callback failed.
            WorkersDifferError: workers see different data. Only the leader raises it.
            RuntimeError, OSError: another error, on the only worker of a generation. With several workers it counts as
                a broken connection.
        """
        with contextlib.nullcontext() if self._kit.readers is None else self._kit.readers:
            return self._live(warm=warm)

    def _live(self, *, warm: bool) -> Ending:
        try:
            if not warm:
                warm_up(self._job, self._kit.transport.device, self._kit.reserve)
                gc.collect()
            gc.freeze()  # otherwise each collection visits all imported modules, which takes longer than a regroup
            self._kit.watchdog.start()
            self._prefetcher.start()
            while (ending := self._turn()) is None:
                pass
            self._kit.teller.catch_up()
        except RendezvousClosedError:
            return Ending.CLOSED
        finally:
            self._kit.watchdog.stop()
            self._prefetcher.stop()
            self._kit.checkpointer.cancel()  # the others do not need it, and the program's end waits for its threads
            self._kit.cache.close()
            self._kit.teller.close()
            gc.unfreeze()
        return ending

    def close(self) -> None:
        """Drop the groups, so that peers that wait in them fail at once."""
        member, self._member = self._member, None
        if member is not None:
            groups = member.release()
            del member
            drop_all(groups)

    def report_failure(self, reason: str, message: str) -> None:
        """If this worker leads, tell the operator that the job cannot continue."""
        if self._member is not None and self._member.leader is not None:
            self._member.leader.on_failed(self._state.control, reason, message)

    def _turn(self) -> Ending | None:
        """Take one round with what follows it, or enter a generation. Returns how this worker's part ended, or None."""
        if self._member is None and self._kit.hooks.stop_requested() and (self._kit.hooks.ends_soon() or self.is_saved):
            return Ending.STOPPED  # told to stop in a round that has broken since
        try:
            # Keep no reference to the member here. Its sockets close with the last one, and peers see that.
            return self._regroup(in_group=False) if self._member is None else self._train(self._member)
        except (RuntimeError, OSError) as error:
            if fault := fault_of(error):
                raise fault from fault.__cause__
            # Alone, no connection can have broken, unless a newer generation has ended a level change.
            if self._alone and not (isinstance(error, RegroupError) or self._is_shut):
                raise
            why = f"generation {self._kit.handler.current} broke at step {self.step}: {error}"
            logger.warning("%s", why)
        # Outside the except clause, whose traceback refers to the groups and would keep their sockets open.
        self._abandon(why)
        return None

    @property
    def why_unsaved(self) -> str:
        """Why the storage does not take this worker's last checkpoint; empty if it does."""
        return self._kit.checkpointer.why_unsaved

    @property
    def saved_step(self) -> int:
        """Step of this worker's last durable checkpoint, if no step was committed since; 0 otherwise."""
        return self.step if self.is_saved and self._job.spec.checkpoint is not None else 0

    @property
    def is_saved(self) -> bool:
        """Whether all that this worker holds is durable, or the job has no checkpoints."""
        return self._between.saved_at_step == self.step or self._job.spec.checkpoint is None

    @property
    def _alone(self) -> bool:
        generation = self._kit.handler.generation if self._member is None else self._member.layout.generation
        return generation is None or len(generation.members) == 1

    @property
    def _is_shut(self) -> bool:
        """Whether the watchdog has shut the connections of the generation."""
        return self._member is not None and self._member.groups.connections.is_shut

    def _train(self, member: Membership) -> Ending | None:
        kit, state, between = self._kit, self._state, self._between
        between.rehearse(state, member)
        # First finish what follows the last step, in case a broken group prevented it.
        if not between.evaluate(state, member):
            return self._leave(member)
        between.decide(state, self._policy, member)
        if is_done(self._job, state.control):
            between.finish(state, member)
            return Ending.FINISHED
        if kit.job.visit_ends(state.control):
            return self._next_visit(member)
        vote, step_seconds = self._take_round(member)
        between.check_finite(state, member, vote)
        if vote.behind and not vote.leaving:
            kit.barrier.pass_after(kit.teller.catch_up, member.groups)
        kit.hooks.on_point(HookPoint.COMMITTED, self.step - 1)
        # A leaver is killed before long, so its checkpoint comes first. The next generation does what follows the step.
        leaving = vote.leaving > 0 or not between.evaluate(state, member)
        if leaving and not between.save_before_leaving(state, member):
            return self._part(member, together=False)
        if not leaving:
            between.offload(state, member)
            boundary = state.control.boundary
            wanted = between.decide(state, self._policy, member)
            between.save(state, member, vote, wanted=wanted)
        if not leaving and not vote.saw_next:
            between.measure(state, member, boundary, step_seconds)
        between.mirror(state, member)
        state.control.round_ended_at = wall_clock()
        kit.hooks.on_point(HookPoint.ENDED, self.step - 1)
        stops = leaving and kit.hooks.stop_requested()
        if vote.saw_next and not stops and not is_done(self._job, state.control):
            return self._regroup(in_group=not leaving)
        return self._part(member) if leaving else None

    def _take_round(self, member: Membership) -> tuple[Vote, float]:
        """Train a round. Returns the vote and the seconds that a step took."""
        started = time.perf_counter()
        steps = self._rounds.num_steps(self._state, self._policy, member)
        if member.stepped:  # the first step ends a pause
            self._visits.read_ahead(self._state.control, member.layout)
        with self._kit.watchdog.timing(ROUND, member.groups.connections, runs=steps):
            vote = self._rounds.train(self._state, self._policy, member, steps)
        seconds = (time.perf_counter() - started) / vote.num_steps
        self._kit.meter.on_steps(vote.num_steps, seconds, member.runner.ahead_share)
        return vote, seconds

    def _leave(self, member: Membership) -> Ending | None:
        """Leave a checkpoint between two rounds, because a member was told to stop."""
        saved = self._between.save_before_leaving(self._state, member)
        self._state.control.round_ended_at = wall_clock()
        return self._part(member, together=saved)

    def _part(self, member: Membership, *, together: bool = True) -> Ending | None:
        """Leave if told to stop. Otherwise wait here until the leavers close their connections and the group breaks.

        Args:
            member: of the generation.
            together: whether all members have left the checkpoint. If not, some may still wait there for this worker.
                Then it drops the group itself.
        """
        if self._kit.hooks.stop_requested():
            return Ending.STOPPED
        if together:
            self._kit.barrier.pass_after(None, member.groups)
        else:
            self._abandon(f"generation {member.layout.number} ended without its last checkpoint")
        return None

    def _next_visit(self, member: Membership) -> Ending | None:
        """Begin the next visit of the job's levels, or do what has to come before it."""
        match self._visits.begin_next(self._tools, self._state, member):
            case Instead.LEAVE:
                return self._leave(member)
            case Instead.REGROUP:
                return self._regroup(in_group=True)
            case Instead.WAIT:
                return None
            case result:
                self._take_over(result)
                assert result.layout is not None
                outgrown = [group for group in member.release() if group is not result.groups.world]
                # A generation may have come because the job waited for this level, and has made no step then.
                self._join(result, result.layout, outgrown, level_change=member.stepped)
                return None

    def _regroup(self, *, in_group: bool) -> Ending | None:
        """Enter the next generation. If that fails, continue in the old one, or wait for another."""
        old = self._member
        try:
            result = regroup(self._tools, self._state, self._kit.committer, in_group=in_group)
        except RegroupError as error:
            if fault := fault_of(error, in_regroup=True):
                raise fault from fault.__cause__
            logger.warning("%s", error)
            self._kit.committer.doubt(error.in_doubt)
            self._note_broken(str(error))
            if old is not None and old.leader is not None:
                self._kit.watcher.watch(self._kit.handler.current)
            return None
        self._take_over(result)
        outgrown = [] if old is None else old.release()
        if result.layout is None:
            drop_all([*outgrown, *result.groups.release()])
            self._kit.meter.on_placed(0)
            self._kit.cache.leave(result.generation.pipelines, result.store)
            return Ending.LEFT
        self._join(result, result.layout, [*outgrown, *result.groups.release_transfer()])
        return None

    def _take_over(self, result: Regrouped) -> None:
        """Hold the committed state, and nothing that the regroup has settled."""
        self._kit.committer.forget_pending()
        self._kit.committer.in_doubt = None
        self._state = result.state
        self.why_broken = ""
        self._kit.mirrors.forget_after(self.step)
        self._member = None

    def _join(
        self, result: Regrouped, layout: StageLayout, outgrown: list[dist.ProcessGroup], *, level_change: bool = False
    ) -> None:
        """Become a member of the committed generation. `outgrown` are the groups of the generation before, or those
        that it had before a level change."""
        self._prefetcher.stop()
        self._visits.forget()
        control = self._state.control
        began = wall_clock() - result.phases.total
        # The time between a suspended job's last round and its next start is no pause.
        started = layout.generation.reason is ResizeReason.START and not level_change
        self._member = member = Membership(
            layout=layout,
            groups=result.groups,
            store=result.store,
            transfers=result.transfers,
            phases=result.phases,
            paused_at=began if started else control.round_ended_at or began,
            first_step=control.step,
            outgrown=outgrown,
            level_change=level_change,
        )
        if layout.is_leader:  # before anything that may fail, so that the leader can report it
            member.leader = self._lead(layout)
            member.leader.tell(GenerationBegun(control, self._kit.checkpointer.known(control)))
        self._policy = self._policy_at(control.policy)
        self._kit.equip(self._state, member)
        member.phases.lap("equip")
        logger.info(
            "generation %d: pipeline %d of %d, stage %d of %d, units %s, %s, step %d, %d frozen",
            layout.number, layout.pipeline, layout.pipelines, layout.stage, layout.stages,
            " and ".join(f"{span.start}-{span.stop - 1}" for span in layout.cut.spans_of(layout.stage)),
            layout.schedule, control.step, control.boundary,
        )  # fmt: skip
        if layout.is_first:
            self._kit.cache.listen(layout, result.store, self._kit.transport.address)
        if layout.is_leader:  # in a level change there may be newer generations, which were not committed
            self._kit.watcher.watch(self._kit.handler.current)
        self._kit.checkpointer.cancel()
        if control.step > 0:
            self._kit.checkpointer.want()

    def _policy_at(self, state: Mapping[str, Any]) -> PolicyCopy:
        return PolicyCopy(self._job.policy, state, self._job.freeze_limits, self._job.spec.freeze.trial)

    def _lead(self, layout: StageLayout) -> Leader:
        kit = self._kit
        visit = self._state.control.visit
        job, larger = self._job.at(visit), self._job.grows_into(visit)
        return Leader(job, kit.reports, kit.teller, kit.run_dir, layout, self._offered, kit.meter, larger)

    def _make_tools(self) -> RegroupTools:
        kit = self._kit
        return RegroupTools(
            handler=kit.handler,
            transport=kit.transport,
            job=self._job,
            checkpoints=kit.checkpointer,
            run_dir=kit.run_dir,
            mirrors=kit.mirrors,
            read_ahead=self._prefetcher,
            barrier=kit.barrier,
            watchdog=kit.watchdog,
            hooks=kit.hooks,
            map_of=self._visits.map_of,
        )

    def _abandon(self, why: str) -> None:
        """Drop a broken group. The committed state and pending steps stay."""
        if self._member is not None:
            self._kit.committer.note_for_the_lost(self._state.control, self._member.layout)
        self._kit.checkpointer.cancel()
        self.close()
        self._kit.committer.go_back()  # last: it waits for the device, and until then that may wait for a dead peer
        self._note_broken(why)

    def _note_broken(self, why: str) -> None:
        self._broken = self._kit.handler.current
        self.why_broken = why.partition("\n")[0]
        self._kit.meter.on_broken()
        self._kit.hooks.on_broken()
