"""The training loop of one worker, through all generations of its job.

A round is one global batch: deal, run the pipeline, reduce gradients, vote, commit. Everything else (freeze,
evaluation, checkpoint, regroup) happens between rounds, decided alike on all workers from the vote. When the group
breaks, the worker keeps its state, lets go of the group and waits for the next generation.
"""

import datetime
import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from pipetransformer_contract.choose import Packing
from pipetransformer_contract.messages import DurableCheckpoint, Generation

from .best import load_best, save_best
from .cache.make import make_cache
from .data import digest
from .durable import Checkpointer
from .elastic.groups import GenerationGroups, Store, Transport, drop_group
from .elastic.mirror import Mirrors
from .elastic.phases import Phases
from .elastic.regroup import Regrouped, RegroupError, RegroupTools, regroup
from .elastic.rendezvous import GenerationRendezvousHandler
from .elastic.watchdog import ROUND, Watchdog
from .elastic.watcher import GenerationWatcher
from .errors import CallbackError, SpecError, StorageError
from .final_model import gather_model, write_final_model
from .freeze import FreezeObservation, PolicyCopy
from .gradients import Gradients
from .job import Job
from .layout import StageLayout
from .leader import Leader, Reporter, wall_clock
from .measuring import measure_costs, measurement_due
from .models import unit_name
from .moments import Moment, Reached, ignore
from .monitoring import Meter, Position
from .optimizer import learning_rate, make_optimizer, set_learning_rate
from .record import CacheLog, Ledger
from .reduction import GradientReducer
from .schedules import ModelError, StageRunner, StageSpec
from .similarity import similarities
from .state import Control, UnitCodec, WorkerState
from .vote import Vote
from .warm_up import warm_up

logger = logging.getLogger(__name__)

#: A leaver keeps its accelerator no longer than this to save others a computation.
_HANDOVER_TIMEOUT = datetime.timedelta(seconds=10)


class Ending(Enum):
    """How a worker's part in its job ended well."""

    FINISHED = "Finished"  #: the job's last step is done and the model is durable
    LEFT = "Left"  #: a generation was committed without this worker
    CLOSED = "Closed"  #: the job had ended before this worker came
    STOPPED = "Stopped"  #: this worker was told to stop


@dataclass
class Hooks:
    """Seams for the process and for tests.

    Attributes:
        reached: called at each moment of the worker's life.
        broke: called when the generation broke: `lost_peers` says whom this worker no longer reaches.
        stop_requested: whether this worker shall leave at the end of the round.
    """

    reached: Reached = ignore
    broke: Callable[[], None] = lambda: None
    stop_requested: Callable[[], bool] = lambda: False


@dataclass
class _Membership:
    """What a worker has while it belongs to a generation."""

    layout: StageLayout
    groups: GenerationGroups
    store: Store
    leader: Leader | None
    transfers: list[tuple[int, int, int]]
    phases: Phases
    paused_at: float
    first_step: int
    outgrown: list[dist.ProcessGroup]
    stepped: bool = field(default=False)
    runner: StageRunner = field(init=False)
    reducer: GradientReducer | None = None

    @property
    def world(self) -> dist.ProcessGroup:
        assert self.groups.world is not None
        return self.groups.world

    def release(self) -> list[dist.ProcessGroup]:
        """Let go of all groups; the caller drops them."""
        if self.reducer is not None:
            self.reducer.close()
        return [*self.groups.release(), *self.outgrown]

    def drop_outgrown(self) -> None:
        """Drop the groups that the generation came from. Each takes up to 20 ms to close, so a thread does it, and not
        in the pause."""
        outgrown, self.outgrown = self.outgrown, []
        threading.Thread(target=_drop_groups, args=(outgrown,), name="drop-groups").start()


class Trainer:
    """One worker of a job. `run` returns when its part has ended."""

    def __init__(
        self,
        job: Job,
        worker: str,
        handler: GenerationRendezvousHandler,
        watcher: GenerationWatcher,
        transport: Transport,
        reporter: Reporter,
        run_dir: Path,
        hooks: Hooks | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._job = job
        self._worker = worker
        self._handler = handler
        self._watcher = watcher
        self._transport = transport
        self._reporter = reporter
        self._run_dir = run_dir
        self._hooks = hooks or Hooks()
        self._watchdog = watchdog or Watchdog()
        self.meter = Meter()
        self._ledger = Ledger(run_dir, worker)
        self._cache_log = CacheLog(run_dir, worker)
        self._checkpointer = Checkpointer(job)
        self._policy = PolicyCopy(job.policy, {})
        self._data = digest(job.dataset)
        self._codec = UnitCodec(job.spec.training.optimizer, job.num_layers, job.model.ties)
        self._state = WorkerState(job.num_layers, job.model.ties)
        self._mirrors = self._make_mirrors()
        self._prefetcher = self._checkpointer.prefetcher()
        self._cache = make_cache(job, worker)
        self._member: _Membership | None = None
        self._pending = False
        self._in_doubt: WorkerState | None = None
        self._broken = 0
        # Outlive a membership, so that a pending step can still be committed when the group has broken.
        self._layout: StageLayout | None = None
        self._committed_in: StageLayout | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._gradients: Gradients | None = None

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
    def lost_peers(self) -> list[str]:
        """Everybody else of the newest generation if it broke: a connection does not say who was at its end, and the
        operator knows who is still heard. Those that follow this worker come first, in case that not all are read."""
        generation = self._handler.generation
        if generation is None or self._broken != generation.layout_generation:
            return []
        names = [member.name for member in [*generation.members, *generation.leavers]]
        if self._worker not in names:
            return []
        own = names.index(self._worker)
        return names[own + 1 :] + names[:own]

    @property
    def committed_generation(self) -> int:
        """The newest generation that this worker has committed as a member, 0 for none; its group may have broken."""
        return 0 if self._layout is None else self._layout.number

    def run(self) -> Ending:
        """Train until the job ends or this worker leaves.

        Raises:
            ModelError: the model failed.
            SpecError: the training diverged, or the freeze policy failed.
            StorageError: a checkpoint or the model cannot be written.
        """
        gc.freeze()  # else each collection visits all that was imported, which takes longer than a regroup
        warm_up(self._job, self._transport.device)
        self._watchdog.start()
        self._prefetcher.start()
        try:
            ending = self._regroup()
            while ending is None:
                ending = self._turn()
        except RendezvousClosedError:
            return Ending.CLOSED
        finally:
            self._watchdog.stop()
            self._prefetcher.stop()
            if self._cache is not None:
                self._cache.close()
            gc.unfreeze()
        return ending

    def close(self) -> None:
        """Let go of the groups, so that peers that wait in them fail at once, too."""
        member, self._member = self._member, None
        if member is not None:
            groups = member.release()
            del member
            _drop_groups(groups)

    def fail(self, reason: str, message: str) -> None:
        """Tell the operator, when this worker leads, that the job cannot go on."""
        if self._member is not None and self._member.leader is not None:
            self._member.leader.failed(self._state.control, reason, message)

    def _turn(self) -> Ending | None:
        """One round and what follows it; a broken group ends in the next generation."""
        if self._member is None:
            return self._regroup()
        try:
            return self._train(self._member)
        except (RuntimeError, OSError) as error:
            if _is_own_fault(error):
                raise
            logger.warning("generation %d broke at step %d: %s", self.generation, self.step, error)
        # Outside of the except clause: its traceback refers to the groups, whose sockets close with the last reference.
        self._abandon()
        return None

    def _train(self, member: _Membership) -> Ending | None:
        # First what a broken group may have kept from being done after the last step.
        self._settle_step(member)
        if self._done:
            self._finish(member)
            return Ending.FINISHED
        started = time.perf_counter()
        with self._watchdog.timing(ROUND, member.groups.connections):
            vote = self._round(member)
        round_seconds = time.perf_counter() - started
        self.meter.stepped(round_seconds)
        self._check_progress(vote)
        self._hooks.reached(Moment.COMMITTED, self.step - 1)
        moved = self._settle_step(member)
        self._save(member, vote, wanted=moved or self._checkpointer.due(self.step))
        if not vote.leaving and not vote.saw_next:
            self._measure(member, round_seconds)
        if self._mirrors.due(self.step, member.layout, member.first_step):
            with self._watchdog.timing("mirror", member.groups.connections):
                self._mirrors.take(self._state, member.layout, member.world)
        self._state.control.round_ended_at = wall_clock()
        self._hooks.reached(Moment.ENDED, self.step - 1)
        if vote.leaving and self._hooks.stop_requested():
            return Ending.STOPPED
        if vote.saw_next and not self._done:
            return self._regroup()
        return None

    def _settle_step(self, member: _Membership) -> bool:
        """Do what belongs to the last step and is not done: ask the freeze policy, evaluate. Whether the boundary
        moved."""
        control = self._state.control
        moved = False
        if control.decided_step != control.step:
            moved = self._decide(Vote.from_list(control.last_vote) if control.last_vote else None)
        if moved:
            self._equip(member)
            if member.leader is not None:
                member.leader.frozen(control)
        if self._evaluation_due():
            self._evaluate(member)
        return moved

    def _round(self, member: _Membership) -> Vote:
        """Train one global batch and commit it."""
        started = time.perf_counter()
        layout, control = member.layout, self._state.control
        self._pending = False
        self._in_doubt = None
        dealt = self._job.training_micro_batches(control.step, layout.pipelines, layout.micro_batch_size)
        micro_batches = dealt[layout.pipeline]
        reducer = member.reducer
        assert reducer is not None
        reducer.begin(len(micro_batches))
        sums = member.runner.train(control.step, micro_batches, self._job.dataset.train)
        self._hooks.reached(Moment.COMPUTED, control.step)
        norms = reducer.finish()
        self._hooks.reached(Moment.REDUCED, control.step)
        similar = self._similarities(member)
        self._pending = True
        ballot = Vote(
            float(self._pass_on_next(member)),
            float(self._hooks.stop_requested()),
            float(self._checkpointer.writing),
            sums.loss,
            sums.weight,
            norms,
            similar,
        )
        vote = ballot.reduce(member.world)
        self._mirrors.settle()
        self._hooks.reached(Moment.VOTED, control.step)
        self._commit(vote)
        self._note_cache(member)
        if member.leader is not None:
            self.meter.led(control.last_step["samples"], skipped=not vote.finite)
            member.leader.stepped(control, vote, seconds=time.perf_counter() - started)
        if not member.stepped:
            self._note_first_step(member)
            member.drop_outgrown()
            # The vote has shown that all have joined, so the first workers' addresses are in the store.
            self._hand_over_cache(member.store, layout.pipelines, layout.pipeline if layout.is_first else None)
        member.stepped = True
        if vote.saw_next:
            self._handler.announce(Generation.model_validate_json(member.store.get("next")))
        return vote

    def _note_first_step(self, member: _Membership) -> None:
        """Tell how long training paused for this generation."""
        member.phases.lap("first step")
        pause, phases = max(0.0, wall_clock() - member.paused_at), member.phases.seconds
        reason, rank = member.layout.generation.reason, member.layout.rank
        self.meter.regrouped(reason, pause, phases, member.transfers, rank)
        if member.leader is not None:
            member.leader.first_step(
                self._state.control, pause_seconds=pause, phases=phases, transfers=member.transfers
            )

    def _note_cache(self, member: _Membership) -> None:
        """Log what the cache did for the step that was just committed."""
        counts = self._cache.take_counts() if self._cache is not None else {}
        if counts:
            self.meter.cached(counts)
            step = self.step - 1
            self._cache_log.append(
                step=step,
                epoch=self._job.order.epoch(step),
                layout_generation=member.layout.number,
                pipelines=member.layout.pipelines,
                counts=counts,
            )

    def _similarities(self, member: _Membership) -> list[float]:
        """What the policy wants to know of the first block that trains; the one worker that has it tells."""
        control, layout = self._state.control, member.layout
        if control.boundary == self._job.num_layers or not self._policy.needs_similarities(control.step + 1):
            return []
        micro_batches = self._job.probe_micro_batches(layout.micro_batch_size)
        front = self._state.units.get(control.boundary + 1)
        return similarities(member.runner, front, micro_batches, self._job.dataset.train, tells=layout.pipeline == 0)

    def _hand_over_cache(self, store: Store, pipelines: int, own: int | None) -> None:
        """Send cached activations to the pipelines that use their samples now; `own` is the one that this worker
        feeds."""
        if self._cache is not None:
            users = self._job.users(pipelines)
            self._cache.hand_over(
                lambda key: users(key.split, key.sample), own, lambda pipeline: store.get(f"cache/{pipeline}").decode()
            )

    def _leave_cache(self, result: Regrouped) -> None:
        """As a leaver, hand over what this worker has cached; nobody waits for it, and it does not take long."""
        if self._cache is None:
            return
        pipelines = result.generation.pipelines
        try:
            result.store.wait([f"cache/{pipeline}" for pipeline in range(pipelines)], _HANDOVER_TIMEOUT)
            self._hand_over_cache(result.store, pipelines, None)
        except RuntimeError as error:
            logger.warning("cached activations are lost: %s", error)
        self._cache.wait_until_handed_over(_HANDOVER_TIMEOUT.total_seconds())

    def _pass_on_next(self, member: _Membership) -> bool:
        """On the leader: whether a newer generation is known; it is then in the store for the others to read."""
        if member.leader is None:
            return False
        found = self._watcher.found(self._handler.current)
        if found is None:
            return False
        member.store.set("next", found.model_dump_json(by_alias=True))
        return True

    def _commit(self, vote: Vote) -> None:
        """Step the optimizer with what all voted for, and write the ledger."""
        control, spec, layout = self._state.control, self._job.spec.training, self._layout
        assert layout is not None
        rate = learning_rate(spec.optimizer, spec.learning_rate_schedule, control.step, self._job.total_steps)
        if vote.finite and self._optimizer is not None:
            assert self._gradients is not None
            self._gradients.scale(vote.gradient_scale(spec.max_gradient_norm))
            set_learning_rate(self._optimizer, rate)
            self._optimizer.step()
        self._hooks.reached(Moment.STEPPED, control.step)
        control.last_vote = vote.to_list() if vote.finite else []
        control.last_similarities = vote.similarities
        control.last_step = {
            "step": control.step,
            "epoch": self._job.order.epoch(control.step),
            "samples": self._job.order.batch_size(control.step),
            "loss": vote.loss if vote.finite else None,
            "gradient_norm": vote.gradient_norm if vote.finite else None,
            "learning_rate": rate,
            "generation": layout.number,
            "frozen_layers": control.boundary,
        }
        control.step += 1
        control.skipped_steps = 0 if vote.finite else control.skipped_steps + 1
        self._committed_in = layout
        self._pending = False
        self._note(control.step - 1, layout, [layout.pipeline])

    def _note(self, step: int, layout: StageLayout, pipelines: Iterable[int]) -> None:
        """Write what these pipelines trained in a committed step into the ledger.

        Raises:
            StorageError: it cannot be written; the step is committed all the same.
        """
        dealt = self._job.training_micro_batches(step, layout.pipelines, layout.micro_batch_size)
        try:
            for pipeline in pipelines:
                self._ledger.append(
                    step=step,
                    epoch=self._job.order.epoch(step),
                    layout_generation=layout.number,
                    pipeline=pipeline,
                    sample_ids=[sample_id for micro_batch in dealt[pipeline] for sample_id in micro_batch.real_ids],
                )
        except OSError as error:
            raise StorageError(f"the run's ledger in {self._run_dir}: {error}") from error

    def _commit_late(self, control: Control) -> None:
        """Commit the pending step as others have, and take over what they decided after it. Part of a regroup, so the
        groups may be gone already."""
        skipped = Vote(loss_sum=float("nan"))
        self._commit(Vote.from_list(control.last_vote) if control.last_vote else skipped)
        self._state.control = control
        self._state.apply_boundary()

    def _measure(self, member: _Membership, round_seconds: float) -> None:
        """Measure what the units cost, where cuts go by that and it is time."""
        control = self._state.control
        if self._job.spec.pipeline.packing is Packing.MEASURED and measurement_due(control):
            split = self._job.dataset.train
            with self._watchdog.timing("measurement", member.groups.connections):
                costs = measure_costs(member.runner, member.layout, member.groups, split, control, round_seconds)
            control.costs = costs.model_dump()

    def _check_progress(self, vote: Vote) -> None:
        """Give up, on all workers alike, when too many steps in a row were not finite."""
        control, limit = self._state.control, self._job.spec.training.max_skipped_steps
        if control.skipped_steps <= limit:
            return
        unit = vote.first_non_finite_unit
        place = "the loss" if unit is None else f"the gradient of {unit_name(unit, self._job.num_layers)}"
        raise SpecError(
            "spec.training.maxSkippedSteps",
            f"{control.skipped_steps} steps in a row were not finite, {limit} may be skipped; at step"
            f" {control.step - 1} it was {place}. A lower learningRate or a maxGradientNorm may help",
            reason="NonFinite",
        )

    def _decide(self, vote: Vote | None) -> bool:
        """Ask the policy, before the first step or after a vote that was finite; whether the boundary moved."""
        control = self._state.control
        observation = FreezeObservation(
            step=control.step,
            epoch=self._job.order.epoch(control.step),
            boundary=control.boundary,
            num_layers=self._job.num_layers,
            unit_gradient_norms=vote.unit_norms if vote is not None else (),
            learning_rate=control.last_step.get("learning_rate", 0.0),
            similarities=control.last_similarities,
        )
        boundary = self._policy.decide(observation)
        control.policy = self._policy.state_dict()
        control.decided_step = control.step
        if boundary == control.boundary:
            return False
        if boundary < control.boundary:
            control.fell_step = control.step
        control.boundary = boundary
        control.boundary_step = control.step
        self._state.apply_boundary()
        return True

    @property
    def _done(self) -> bool:
        """Whether there is nothing left to train, or no hope of a better model."""
        patience, control = self._job.spec.evaluation.patience, self._state.control
        return self.step >= self._job.total_steps or (
            patience is not None and control.evaluations_since_best >= patience
        )

    def _evaluation_due(self) -> bool:
        return self._state.control.evaluated_step != self.step and self._job.evaluates_after(self.step)

    def _evaluate(self, member: _Membership) -> None:
        layout, control = member.layout, self._state.control
        micro_batches = self._job.test_micro_batches(layout.pipelines, layout.micro_batch_size)[layout.pipeline]
        metrics = list(self._job.metrics.values())
        rounds = math.ceil(len(self._job.dataset.test) / self._job.order.global_batch)
        with self._watchdog.timing("evaluation", member.groups.connections, rounds):
            scores = member.runner.evaluate(micro_batches, self._job.dataset.test, metrics, name="test")
            dist.all_reduce(scores, group=member.world)
        values = {
            name: numerator / denominator if denominator else math.nan
            for name, (numerator, denominator) in zip(self._job.metrics, scores.tolist(), strict=True)
        }
        better = control.is_better(values, self._job.spec.evaluation)
        if better and self._job.spec.evaluation.keep_best:
            save_best(self._job, self._state, layout, member.world)
        control.note_evaluation(values, better=better)  # last: what breaks before it is done again
        if member.leader is not None:
            member.leader.evaluated(control, better=better)

    def _save(self, member: _Membership, vote: Vote, *, wanted: bool) -> None:
        """Go on with a checkpoint that is being written, and begin one that is wanted. One who leaves waits for it."""
        if vote.leaving:
            self._note_durable(member, self._checkpointer.save_now(self._state, member.layout, member.world))
            return
        self._note_durable(member, self._checkpointer.advance(vote.writing, leads=member.leader is not None))
        if wanted:
            self._checkpointer.want()
        self._checkpointer.begin(self._state, member.layout)

    def _note_durable(self, member: _Membership, checkpoint: DurableCheckpoint | None) -> None:
        if member.leader is not None and checkpoint is not None:
            member.leader.checkpointed(self._state.control, checkpoint)

    def _regroup(self) -> Ending | None:
        """Enter the next generation; when that fails, go on in the old one, or wait for another."""
        old = self._member
        try:
            result = regroup(self._tools(), self._state.joined(self._in_doubt), pending=self._pending)
        except RegroupError as error:
            logger.warning("%s", error)
            self._in_doubt = error.in_doubt or self._in_doubt
            self._note_broken()
            if old is not None and old.leader is not None:
                self._watcher.watch(self._handler.current)
            return None
        self._pending = False
        self._in_doubt = None
        self._state = result.state
        self._mirrors.forget_after(self.step)
        self._member = None
        outgrown = [] if old is None else old.release()
        if result.layout is None:
            _drop_groups([*outgrown, *result.groups.release()])
            self._leave_cache(result)
            return Ending.LEFT
        self._join(result, result.layout, [*outgrown, *result.groups.release_transfer()])
        return None

    def _join(self, result: Regrouped, layout: StageLayout, outgrown: list[dist.ProcessGroup]) -> None:
        """Become a member of the committed generation. `outgrown` are the groups that it came from."""
        self._prefetcher.stop()
        control = self._state.control
        self._policy = PolicyCopy(self._job.policy, control.policy)
        if control.step == 0:
            self._decide(None)
        leader = Leader(self._job, self._reporter, self._run_dir, layout) if layout.is_leader else None
        member = _Membership(
            layout=layout,
            groups=result.groups,
            store=result.store,
            leader=leader,
            transfers=result.transfers,
            phases=result.phases,
            paused_at=control.round_ended_at or wall_clock() - result.phases.total,
            first_step=control.step,
            outgrown=outgrown,
        )
        self._equip(member)
        member.phases.lap("equip")
        self._member = member
        logger.info(
            "generation %d: pipeline %d of %d, stage %d of %d, units %d-%d, step %d, %d frozen",
            layout.number, layout.pipeline, layout.pipelines, layout.stage, layout.stages,
            layout.span.start, layout.span.stop - 1, control.step, control.boundary,
        )  # fmt: skip
        if layout.is_first:
            address = "" if self._cache is None else self._cache.listen(self._transport.address)
            result.store.set(f"cache/{layout.pipeline}", address)
        if leader is not None:
            leader.committed(control, self._checkpointer.newest())
            self._watcher.watch(layout.number)
        self._checkpointer.give_up()
        if control.step > 0:
            self._checkpointer.want()

    def _equip(self, member: _Membership) -> None:
        """Make what depends on the present boundary: the runner, the reduction of gradients, the optimizer."""
        member.runner = self._make_runner(member.layout, member.groups)
        if member.reducer is not None:
            member.reducer.close()
        self._gradients = None  # its memory goes before the next one's comes
        self._gradients = Gradients(self._state, member.layout)
        member.reducer = GradientReducer(self._gradients, self._state, member.layout, member.groups)
        self._optimizer = make_optimizer(
            self._job.spec.training.optimizer,
            self._state.trained_parameters(),
            self._state.moments,
            self._job.no_decay,
        )
        self._layout = member.layout

    def _make_runner(self, layout: StageLayout, groups: GenerationGroups) -> StageRunner:
        assert groups.pipeline is not None
        spec = StageSpec(
            stage=layout.stage,
            stages=layout.stages,
            span=layout.span,
            boundary=self._state.control.boundary,
            schedule=self._job.schedule,
            group=groups.pipeline,
            device=self._transport.device,
            dtype=self._job.dtype,
            autocast=self._job.autocast,
            recompute=self._job.spec.training.activation_checkpointing,
        )
        return StageRunner(
            spec,
            self._job.model,
            [self._state.units[index] for index in layout.span],
            self._cache,
            lambda step: self._job.training_samples(step, layout),
        )

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
            data=self._data,
            build_units=self._job.build_units,
            blank_unit=self._job.blank_unit,
            load_unit=self._checkpointer.load_unit,
            load_control=self._checkpointer.load_control,
            durable=self._checkpointer.durable,
            cut_at=self._job.cut,
            commit_late=self._commit_late,
            mirrors=self._mirrors,
            read_ahead=self._prefetcher.units,
            watchdog=self._watchdog,
            reached=self._hooks.reached,
        )

    def _abandon(self) -> None:
        """Give up a broken group. State and pending gradients stay."""
        if self._member is not None:
            self._note_for_the_lost(self._member.layout)
        self.close()
        self._note_broken()

    def _note_broken(self) -> None:
        self._broken = self._handler.current
        self.meter.broke()
        self._hooks.broke()

    def _note_for_the_lost(self, layout: StageLayout) -> None:
        """Whoever died between its vote and its ledger has committed what this worker has: note it in its place."""
        if self._committed_in is layout:
            others = [pipeline for pipeline in range(layout.pipelines) if pipeline != layout.pipeline]
            self._note(self.step - 1, layout, others)

    def _finish(self, member: _Membership) -> None:
        """Make the model durable, the best if that is kept; all wait until it is."""
        self._note_durable(member, self._checkpointer.complete(member.layout, member.world))
        self._checkpointer.begin(self._state, member.layout)  # what was asked for meanwhile
        self._note_durable(member, self._checkpointer.complete(member.layout, member.world))
        if self._job.spec.evaluation.keep_best and self._state.control.best:
            tensors = load_best(self._job) if member.leader is not None else {}
        else:
            tensors = gather_model(
                self._job, self._state, self._codec, member.layout, member.world, self._transport.device
            )
        if member.leader is not None:
            write_final_model(self._job, tensors, self._run_dir)
        dist.all_reduce(torch.ones(1), group=member.world)
        if member.leader is not None:
            member.leader.finished(self._state.control)


def _drop_groups(groups: list[dist.ProcessGroup]) -> None:
    """Drop groups, of which the caller keeps no other reference: their sockets close with the last one."""
    while groups:
        drop_group(groups.pop())
    gc.collect()  # a stage of torch's pipeline, which refers to its group, hangs in a cycle


def _is_own_fault(error: BaseException) -> bool:
    """Whether the user's code failed, and not a connection."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModelError | CallbackError):
            return True
        cause = cause.__cause__
    return False
