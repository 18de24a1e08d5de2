"""The life of one worker, through all generations of its job.

A round trains one global batch (`rounds`). Everything else (freeze, evaluation, checkpoint, regroup) happens between
rounds, decided alike on all workers from the vote. When the group breaks, the worker keeps its state, lets go of the
group and waits for the next generation.
"""

import contextlib
import gc
import logging
import time
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from pipetransformer.callbacks.callback import Teller
from pipetransformer.checkpoint.best_model import load_best
from pipetransformer.checkpoint.checkpointer import Checkpointer
from pipetransformer.data import Readers
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler
from pipetransformer.elastic.generations.watcher import GenerationWatcher
from pipetransformer.elastic.regroup.mirrors import Mirrors
from pipetransformer.elastic.regroup.transaction import Regrouped, RegroupError, RegroupTools, regroup
from pipetransformer.elastic.transport.barrier import Barrier
from pipetransformer.elastic.transport.groups import Transport
from pipetransformer.elastic.transport.watchdog import ROUND, Watchdog
from pipetransformer.errors import RunningModel, StorageError, fault_of
from pipetransformer.freeze import PolicyCopy
from pipetransformer.hooks import HookPoint, Hooks
from pipetransformer.job.job import Job
from pipetransformer.metrics import Meter, Position
from pipetransformer.record import newest_generation
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer.training.after_step import check_progress, is_done, move_boundary, stages_too_few
from pipetransformer.training.cache_handover import WorkerCache
from pipetransformer.training.commit import Committer
from pipetransformer.training.cost_measurement import measure_costs, measurement_due
from pipetransformer.training.evaluation import evaluate, evaluation_due, rehearse
from pipetransformer.training.final_model import gather_model, write_final_model
from pipetransformer.training.leader import Leader, Offered, ReportSink, wall_clock
from pipetransformer.training.membership import Membership, drop_groups
from pipetransformer.training.memory_reserve import Reserve
from pipetransformer.training.non_finite import find_beginning
from pipetransformer.training.round import Rounds
from pipetransformer.training.vote import Vote
from pipetransformer_contract.choose import Packing
from pipetransformer_contract.messages import DurableCheckpoint, ResizeReason

from .warm_up import warm_up

logger = logging.getLogger(__name__)


class Ending(Enum):
    """How a worker's part in its job ended well."""

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
        self._job = job
        self._handler = handler
        self._watcher = watcher
        self._transport = transport
        self._reports = reports
        self._run_dir = run_dir
        self._hooks = hooks or Hooks()
        self._watchdog = watchdog or Watchdog()
        self.meter = meter or Meter()
        self._committer = Committer(job, worker, run_dir, self._hooks.reached)
        self._cache = WorkerCache(job, worker, run_dir, self.meter)
        self._checkpointer = Checkpointer(job, self._hooks)
        self._policy = PolicyCopy(job.policy, {})
        self._readers = Readers.of(job.dataset, job.spec.data.loader_processes)
        self._codec = UnitCodec(job.spec.training.optimizer, job.num_layers, job.model.ties)
        self._state = WorkerState(job.num_layers, job.model.ties)
        self._mirrors = self._make_mirrors()
        self._prefetcher = self._checkpointer.prefetcher()
        self._reserve = Reserve()
        self._barrier = Barrier(self._watchdog)
        self._teller = Teller(job.callbacks)
        self._offered = Offered()
        self._rounds = Rounds(
            job,
            handler,
            watcher,
            self._committer,
            self._checkpointer,
            self._mirrors,
            self._teller,
            self._cache,
            self._reserve,
            self.meter,
            self._hooks,
        )
        self._member: Membership | None = None
        self._broken = 0
        self._left_at: int | None = None
        #: Why the newest generation broke, or did not come about; empty in one that is whole.
        self.why_broken = ""

    @property
    def step(self) -> int:
        """Steps committed so far."""
        return self._state.control.step

    @property
    def control(self) -> Control:
        """What all workers know alike of the run so far."""
        return self._state.control

    @property
    def generation(self) -> int:
        """The generation that this worker is a member of, 0 for none."""
        return 0 if self._member is None else self._member.layout.number

    @property
    def position(self) -> Position:
        """Where this worker stands; may be asked by any thread."""
        member = self._member
        leader = None if member is None else member.leader
        return Position(
            control=self._state.control,
            layout=None if member is None else member.layout,
            num_layers=self._job.num_layers,
            idle_share=None if leader is None else leader.idle_share,
        )

    @property
    def stages_too_few(self) -> int | None:
        """How many stages were too few, where this worker has too little memory; None where more would not help."""
        member = self._member
        layout = self._committer.layout if member is None else member.layout
        first_step = self.step if member is None else member.first_step
        return None if layout is None else stages_too_few(self._job, self._state.control, layout.stages, first_step)

    @property
    def lost_peers(self) -> list[str]:
        """Everybody else of the newest generation if it broke: a connection does not say who was at its end, and the
        operator knows who is still heard. Those that follow this worker come first, in case that not all are read."""
        return self._handler.others if self._broken == self._handler.current else []

    @property
    def committed_generation(self) -> int:
        """The newest generation that this worker has committed as a member, 0 for none; its group may have broken."""
        layout = self._committer.layout
        return 0 if layout is None else layout.number

    def run(self, *, warm: bool = False) -> Ending:
        """Train until the job ends or this worker leaves.

        Args:
            warm: this process has trained before, and is awaited.

        Raises:
            ModelError: the model failed.
            DeviceError, DeviceMemoryError: the accelerator failed, or has too little memory.
            SpecError: the training diverged, or the freeze policy failed.
            StorageError: a checkpoint or the model cannot be written.
            CallbackError: a callback failed.
        """
        with contextlib.nullcontext() if self._readers is None else self._readers:
            return self._live(warm=warm)

    def _live(self, *, warm: bool) -> Ending:
        try:
            gc.freeze()  # else each collection visits all that was imported, which takes longer than a regroup
            if not warm:
                warm_up(self._job, self._transport.device, self._reserve)
            self._watchdog.start()
            self._prefetcher.start()
            while (ending := self._turn()) is None:
                pass
            self._teller.catch_up()
        except RendezvousClosedError:
            return Ending.CLOSED
        finally:
            self._watchdog.stop()
            self._prefetcher.stop()
            self._checkpointer.give_up()  # the others count on none of it, and a program's end waits for its threads
            self._cache.close()
            self._teller.close()
            gc.unfreeze()
        return ending

    def close(self) -> None:
        """Let go of the groups, so that peers that wait in them fail at once, too."""
        member, self._member = self._member, None
        if member is not None:
            groups = member.release()
            del member
            drop_groups(groups)

    def fail(self, reason: str, message: str) -> None:
        """Tell the operator, when this worker leads, that the job cannot go on."""
        if self._member is not None and self._member.leader is not None:
            self._member.leader.on_failed(self._state.control, reason, message)

    def _turn(self) -> Ending | None:
        """One round and what follows it, or the way into a generation; a broken group ends in the next one."""
        if self._member is None and self._hooks.stop_requested() and (self._hooks.ends_soon() or self.has_left):
            return Ending.STOPPED  # told in a round that has broken since
        try:
            # No name here may refer to the member: its sockets, whose end tells the others, close with the last one.
            return self._regroup(in_group=False) if self._member is None else self._train(self._member)
        except (RuntimeError, OSError) as error:
            if fault := fault_of(error):
                raise fault from fault.__cause__
            if self._alone:  # nobody's connection could have broken
                raise
            why = f"generation {self._handler.current} broke at step {self.step}: {error}"
            logger.warning("%s", why)
        # Outside of the except clause: its traceback refers to the groups, whose sockets close with the last reference.
        self._abandon(why)
        return None

    @property
    def why_unsaved(self) -> str:
        """Why the storage does not take the checkpoint that this worker was told to leave; empty where it does."""
        return self._checkpointer.why_unsaved

    @property
    def saved_step(self) -> int:
        """Steps of the durable checkpoint that this worker left last, if none was made since; 0 otherwise."""
        return self.step if self.has_left and self._job.spec.checkpoint is not None else 0

    @property
    def has_left(self) -> bool:
        """Whether all that this worker holds is durable, as far as that is possible."""
        return self._left_at == self.step or self._job.spec.checkpoint is None

    @property
    def _alone(self) -> bool:
        generation = self._handler.generation if self._member is None else self._member.layout.generation
        return generation is None or len(generation.members) == 1

    def _train(self, member: Membership) -> Ending | None:
        self._rehearse(member)
        # First what a broken group may have kept from being done after the last step.
        if not self._evaluate(member):
            self._leave_checkpoint(member)
            self._state.control.round_ended_at = wall_clock()
            return self._part(member)
        self._decide(member)
        if is_done(self._job, self._state.control):
            self._finish(member)
            return Ending.FINISHED
        started = time.perf_counter()
        with self._watchdog.timing(ROUND, member.groups.connections):
            vote = self._rounds.train(self._state, self._policy, member)
        round_seconds = time.perf_counter() - started
        self.meter.on_step(round_seconds)
        if not vote.finite:
            began = find_beginning(self._job, self._state.control, vote, member, self._watchdog)
            if member.leader is not None:
                member.leader.on_skipped(self._state.control, began.unit or began.what)
            check_progress(self._job, self._state.control, began)
        if vote.behind and not vote.leaving:
            self._barrier.pass_after(self._teller.catch_up, member.groups)
        self._hooks.reached(HookPoint.COMMITTED, self.step - 1)
        # Who leaves is killed before long: first its checkpoint. The next generation begins with what follows the step.
        leaving = vote.leaving > 0 or not self._evaluate(member)
        if leaving:
            self._leave_checkpoint(member)
        else:
            moved = self._decide(member)
            self._save(member, vote, wanted=moved or self._checkpointer.due(self.step, vote.save))
        if not leaving and not vote.saw_next:
            self._measure(member, round_seconds)
        if self._mirrors.due(self.step, member.layout, member.first_step):
            with self._watchdog.timing("mirror", member.groups.connections):
                self._mirrors.take(self._state, member.layout, member.world)
        self._state.control.round_ended_at = wall_clock()
        self._hooks.reached(HookPoint.ENDED, self.step - 1)
        stops = leaving and self._hooks.stop_requested()
        if vote.saw_next and not stops and not is_done(self._job, self._state.control):
            return self._regroup(in_group=not leaving)
        return self._part(member) if leaving else None

    def _part(self, member: Membership) -> Ending | None:
        """Who was told to stop leaves. The others begin nothing that would break with this group: it does, in here,
        once they have gone."""
        if self._hooks.stop_requested():
            return Ending.STOPPED
        self._barrier.pass_after(None, member.groups)
        return None

    def _rehearse(self, member: Membership) -> None:
        """Before the first step of a run, score a few held-out samples: what fails in an evaluation fails at once."""
        step = self._state.control.step
        begins = member.layout.generation.reason is ResizeReason.START and step == member.first_step
        if (begins or step == 0) and len(self._job.dataset.test):
            rehearse(self._job, member, self._watchdog)

    def _decide(self, member: Membership) -> bool:
        """Ask the freeze policy after the last step or before the first, once even if generations break in between.
        Returns whether the boundary moved.

        The evaluation comes first, because it may end the training: then nothing that froze would ever train frozen.
        """
        control = self._state.control
        if control.decided_step == control.step or is_done(self._job, control):
            return False
        moved = move_boundary(self._job, self._policy, self._state)
        if moved:
            self._equip(member)
            if member.leader is not None:
                member.leader.on_frozen(control)
        return moved

    def _evaluate(self, member: Membership) -> bool:
        """Evaluate after the last step, if that is due. False if somebody was told to stop before it was done."""
        if not evaluation_due(self._job, self._state.control):
            return True
        stop_requested, began = self._hooks.stop_requested, time.perf_counter()
        done = evaluate(self._job, self._state, member, self._watchdog, self._barrier, stop_requested)
        if not member.stepped:
            member.leave_out_of_pause(time.perf_counter() - began)
        return done

    def _measure(self, member: Membership, round_seconds: float) -> None:
        """Measure what the units cost, where cuts go by that and it is time."""
        control = self._state.control
        if self._job.spec.pipeline.packing is Packing.MEASURED and measurement_due(control):
            split = self._job.dataset.train
            with self._watchdog.timing("measurement", member.groups.connections):
                costs = measure_costs(member.runner, member.layout, member.groups, split, control, round_seconds)
            control.costs = costs.model_dump()

    def _leave_checkpoint(self, member: Membership) -> None:
        """Write one, and wait until it is durable: somebody was told to stop."""
        try:
            checkpoint = self._checkpointer.save_now(self._state, member.layout, member.groups, self._barrier)
        except StorageError as error:
            logger.error("the steps since the newest checkpoint are lost: %s", error)
            return
        self._left_at = self.step
        self._note_durable(member, checkpoint)

    def _save(self, member: Membership, vote: Vote, *, wanted: bool) -> None:
        """Go on with a checkpoint that is being written, and begin one that is wanted."""
        self._note_durable(member, self._checkpointer.advance(vote.writing, leads=member.leader is not None))
        if wanted:
            self._checkpointer.want()
        self._checkpointer.begin(self._state, member.layout, member.groups, self._barrier)

    def _note_durable(self, member: Membership, checkpoint: DurableCheckpoint | None) -> None:
        if member.leader is not None and checkpoint is not None:
            member.leader.on_checkpoint(self._state.control, checkpoint)

    def _regroup(self, *, in_group: bool) -> Ending | None:
        """Enter the next generation; when that fails, go on in the old one, or wait for another."""
        old = self._member
        try:
            result = regroup(
                self._tools(),
                self._state,
                in_doubt=self._committer.in_doubt,
                pending=self._committer.pending,
                in_group=in_group,
            )
        except RegroupError as error:
            if fault := fault_of(error, in_regroup=True):
                raise fault from fault.__cause__
            logger.warning("%s", error)
            self._committer.in_doubt = error.in_doubt or self._committer.in_doubt
            self._note_broken(str(error))
            if old is not None and old.leader is not None:
                self._watcher.watch(self._handler.current)
            return None
        self._committer.pending = None
        self._committer.in_doubt = None
        self._state = result.state
        self.why_broken = ""
        self._mirrors.forget_after(self.step)
        self._member = None
        outgrown = [] if old is None else old.release()
        if result.layout is None:
            drop_groups([*outgrown, *result.groups.release()])
            self._cache.leave(result.generation.pipelines, result.store)
            return Ending.LEFT
        self._join(result, result.layout, [*outgrown, *result.groups.release_transfer()])
        return None

    def _join(self, result: Regrouped, layout: StageLayout, outgrown: list[dist.ProcessGroup]) -> None:
        """Become a member of the committed generation. `outgrown` are the groups that it came from."""
        self._prefetcher.stop()
        control = self._state.control
        began = wall_clock() - result.phases.total
        # From a suspended job's last round to its next start nobody paused.
        started = layout.generation.reason is ResizeReason.START
        self._member = member = Membership(
            layout=layout,
            groups=result.groups,
            store=result.store,
            transfers=result.transfers,
            phases=result.phases,
            paused_at=began if started else control.round_ended_at or began,
            first_step=control.step,
            outgrown=outgrown,
        )
        if layout.is_leader:  # before what may fail, which it would tell of
            member.leader = Leader(self._job, self._reports, self._teller, self._run_dir, layout, self._offered)
            member.leader.on_committed(control, self._checkpointer.known(control))
        self._policy = PolicyCopy(self._job.policy, control.policy)
        self._equip(member)
        member.phases.lap("equip")
        logger.info(
            "generation %d: pipeline %d of %d, stage %d of %d, units %d-%d, step %d, %d frozen",
            layout.number, layout.pipeline, layout.pipelines, layout.stage, layout.stages,
            layout.span.start, layout.span.stop - 1, control.step, control.boundary,
        )  # fmt: skip
        if layout.is_first:
            self._cache.listen(layout, result.store, self._transport.address)
        if layout.is_leader:
            self._watcher.watch(layout.number)
        self._checkpointer.give_up()
        if control.step > 0:
            self._checkpointer.want()

    def _make_mirrors(self) -> Mirrors:
        spec, codec, shells = self._job.spec.mirror, self._codec, self._job.model.units
        return Mirrors(
            None if spec is None else spec.every_steps,
            lambda state, index: codec.give(state, index, self._transport.device),
            lambda index, boundary: codec.blank(index, shells[index], boundary, torch.device("cpu")),
        )

    def _tools(self) -> RegroupTools:
        return RegroupTools(
            handler=self._handler,
            transport=self._transport,
            codec=self._codec,
            shells=self._job.model.units,
            data=self._job.data_digest,
            build_units=self._job.build_units,
            blank_unit=self._job.blank_unit,
            load_unit=self._checkpointer.load_unit,
            load_control=self._checkpointer.load_control,
            durable=self._checkpointer.durable,
            kept_step=self._checkpointer.kept_step,
            newest_generation=self._newest_generation,
            cut_at=self._job.cut,
            commit_late=lambda control: self._committer.commit_late(self._state, control),
            mirrors=self._mirrors,
            read_ahead=self._prefetcher.units,
            barrier=self._barrier,
            watchdog=self._watchdog,
            reached=self._hooks.reached,
        )

    def _newest_generation(self) -> int:
        """The highest layout generation of earlier jobs: also what trained and left nothing in the storage."""
        stored = self._checkpointer.newest_generation()
        return max(stored, newest_generation(self._run_dir)) if stored else 0  # else the record is another run's

    def _abandon(self, why: str) -> None:
        """Give up a broken group. State and pending gradients stay."""
        if self._member is not None:
            self._committer.note_for_the_lost(self._state.control, self._member.layout)
        self._checkpointer.give_up()
        self.close()
        self._note_broken(why)

    def _note_broken(self, why: str) -> None:
        self._broken = self._handler.current
        self.why_broken = why.partition("\n")[0]
        self.meter.on_broken()
        self._hooks.on_broken()

    def _equip(self, member: Membership) -> None:
        device, activations = self._transport.device, self._cache.activations
        with RunningModel("making a stage and its optimizer"):  # no connection can have broken in it
            member.equip(self._job, self._state, self._committer, activations, self._readers, device)

    def _finish(self, member: Membership) -> None:
        """Make the model durable, the best if that is kept; all wait until it is."""
        job, groups, leader = self._job, member.groups, member.leader
        self._note_durable(member, self._checkpointer.complete(member.layout, groups, self._barrier))
        # What was asked for meanwhile.
        self._checkpointer.begin(self._state, member.layout, groups, self._barrier)
        self._note_durable(member, self._checkpointer.complete(member.layout, groups, self._barrier))
        best = self._state.control.best_is_kept
        device = self._transport.device
        tensors = {} if best else gather_model(job, self._state, self._codec, member, device, self._watchdog)

        def write() -> None:
            self._teller.catch_up()
            control = self._state.control
            steps = control.best_step if best else control.step
            write_final_model(job, load_best(job) if best else tensors, self._run_dir, steps=steps)

        self._barrier.pass_after(None if leader is None else write, groups)
        if leader is not None:
            leader.on_finished(self._state.control)
