"""What a worker does between two rounds: freeze, evaluate, measure, save, and finish the job.

All members of a generation decide the same, because each decision follows from the vote and the control state.
"""

import logging
import time
from functools import partial

from pipetransformer.checkpoint.best_model import load_best
from pipetransformer.checkpoint.level_weights import begin_to_keep
from pipetransformer.checkpoint.weights_saving import WeightsSaving
from pipetransformer.errors import StorageError
from pipetransformer.freeze import PolicyCopy
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.choose import Packing
from pipetransformer_contract.messages import DurableCheckpoint, ResizeReason

from .after_step import check_progress, is_done, move_boundary
from .cost_measurement import measure_costs, measurement_due
from .evaluation import evaluate, evaluation_due, rehearse
from .final_model import gather_model, write_final_model
from .kit import Kit
from .leader_events import BoundaryMoved, CheckpointWritten, FreezeKept, StepSkipped
from .membership import Membership
from .non_finite import find_beginning
from .slice_measurement import measure_slices, slices_due
from .vote import Vote

logger = logging.getLogger(__name__)


class BetweenRounds:
    """Does one worker's work between rounds, through all generations.

    Attributes:
        saved_at_step: committed steps in the newest checkpoint that `save_before_leaving` wrote; None before the first.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self.saved_at_step: int | None = None

    def rehearse(self, state: WorkerState, member: Membership) -> None:
        """Try an evaluation and slices of tokens before the first step of a start, so that their errors show at once. A
        generation that begins again at step 0 repeats this."""
        job, step = self._kit.job, state.control.step
        starts = member.layout.generation.reason is ResizeReason.START and not member.level_change
        begins = starts and step == member.first_step
        if begins or step == 0:
            rehearse(job, member, self._kit.watchdog)

    def check_finite(self, state: WorkerState, member: Membership, vote: Vote) -> None:
        """If the newest step was skipped, find where its numbers stopped being finite. Fail the job if too many steps
        in a row were skipped.

        Raises:
            SpecError: too many steps in a row were skipped.
        """
        if vote.finite:
            return
        kit, control = self._kit, state.control
        began = find_beginning(kit.job, control, vote, member, kit.watchdog)
        if member.leader is not None:
            member.leader.tell(StepSkipped(control, began.unit or began.what))
        check_progress(kit.job, control, began)

    def decide(self, state: WorkerState, policy: PolicyCopy, member: Membership) -> bool:
        """Ask the freeze policy after the newest step, or before the first. Returns whether a checkpoint is wanted,
        because the boundary moved or a trial ended well.

        The policy is asked once for each step, even if a generation breaks before the next step. Call this after the
        evaluation, because that may end the training, and then no layers need to freeze.
        """
        job, control = self._kit.job, state.control
        if control.decided_step == control.step or is_done(job, control) or not job.is_last(control.visit):
            return False
        moved = move_boundary(job, policy, state)
        if moved:
            self._kit.equip(state, member)
            if member.leader is not None:
                member.leader.tell(BoundaryMoved(control))
        verdict = policy.verdict
        kept = verdict is not None and verdict.kept
        if kept:
            control.settle()
        if member.leader is not None and verdict is not None:
            logger.info("step %d: %s", control.step, verdict.words)
            if kept:
                member.leader.tell(FreezeKept(control, verdict.words))
        return moved or kept

    def offload(self, state: WorkerState, member: Membership) -> None:
        """Move frozen layers to host memory, if the last vote showed that the caches now hold their outputs for all
        samples."""
        if state.control.cached_layers != member.placed_for:
            self._kit.place(state, member)
            self._kit.cache.measure_again()

    def begin_to_keep(self, state: WorkerState, member: Membership) -> WeightsSaving | None:
        """Begin to save the weights of this level, if the next level is smaller. This level needs them when it trains
        again. Threads write them while the members change the level. Returns None if they need not be saved."""
        kit, control = self._kit, state.control
        if control.visit_done or kit.job.grows_into(control.visit) is not None:
            return None
        return begin_to_keep(kit.job, state, member.layout, kit.hooks)

    def end_visit(self, state: WorkerState, member: Membership, saving: WeightsSaving | None) -> bool:
        """End a visit (the period in which one level trains) before a regroup, which then begins the next visit.

        Args:
            state: what this worker holds.
            member: of the generation.
            saving: the result of `begin_to_keep`.

        Returns:
            Whether the visit has ended. It has not if a member was told to stop before the weights were durable.

        Raises:
            StorageError: the weights cannot be written, and waiting will not help.
            RuntimeError: a connection broke.
        """
        sum_barrier = partial(self._kit.barrier.sum_after, groups=member.groups)
        state.control.visit_done = saving is None or saving.wait(sum_barrier)
        return state.control.visit_done

    def evaluate(self, state: WorkerState, member: Membership) -> bool:
        """Evaluate after the newest step, if an evaluation is due. Returns False if a member was told to stop before
        the evaluation was complete, otherwise True."""
        kit = self._kit
        if not evaluation_due(kit.job, state.control):
            return True
        began = time.perf_counter()
        done = evaluate(kit.job, state, member, kit.watchdog, kit.barrier, kit.hooks)
        if not member.stepped:
            member.leave_out_of_pause(time.perf_counter() - began)
        return done

    def measure(self, state: WorkerState, member: Membership, boundary: int, step_seconds: float) -> None:
        """Measure the costs of the units if a measurement is due.

        With packing `Measured`, the costs decide how the model is cut into stages. With TeraPipe's schedule, the costs
        of slices of tokens decide how long these slices are.

        Args:
            state: what this worker holds.
            member: of the generation.
            boundary: number of layers that were frozen in the last step.
            step_seconds: how long a step of the last round took.
        """
        kit, control = self._kit, state.control
        if kit.job.spec.pipeline.packing is Packing.MEASURED and measurement_due(control, kit.job.total_steps):
            split = kit.job.dataset.train
            with kit.watchdog.timing("measurement", member.groups.connections):
                costs = measure_costs(
                    member.runner,
                    member.layout,
                    member.groups,
                    split,
                    control,
                    step_seconds,
                    kit.usable_bytes,
                    host_apart=kit.host_apart,
                )
            layouts, layout = kit.job.at(control.visit).layouts, member.layout
            costs = layouts.step_model(costs).costs_within_step(boundary, layout.cut, layout.pipelines)
            control.costs = costs.model_dump()
        if slices_due(kit.job, control, member.layout):
            with kit.watchdog.timing("measurement", member.groups.connections):
                slice_costs = measure_slices(
                    member.runner, member.layout, member.groups, kit.job.dataset.train, control
                )
            control.slice_costs = slice_costs.model_dump()
            kit.equip(state, member)

    def mirror(self, state: WorkerState, member: Membership) -> None:
        """Copy the committed state of each stage to the next worker's host memory, if a mirror is due.

        The mirror before is dropped only once all members have the new one, because a group that breaks before may be
        followed by one that takes no mirrors.

        Raises:
            RuntimeError: a connection broke. Both mirrors stay.
        """
        kit = self._kit
        if not kit.mirrors.due(state.control.step, member.layout, member.first_step):
            return
        with kit.watchdog.timing("mirror", member.groups.connections):
            kit.mirrors.take(state, member.layout, member.world)
        kit.barrier.pass_after(None, member.groups)
        kit.mirrors.settle()

    def save_before_leaving(self, state: WorkerState, member: Membership) -> bool:
        """Write a checkpoint and wait until it is durable, because a member was told to stop.

        Returns:
            Whether it is durable. If not, other members may still wait for this worker, so this worker must leave the
            group.
        """
        kit = self._kit
        try:
            checkpoint = kit.checkpointer.save_now(state, member.layout, member.groups, kit.barrier)
        except StorageError as error:
            logger.error("the steps since the newest checkpoint are lost: %s", error)
            return False
        self.saved_at_step = state.control.step
        _note_durable(state, member, checkpoint)
        return True

    def save(self, state: WorkerState, member: Membership, vote: Vote, *, wanted: bool) -> None:
        """Request a checkpoint if one is due by the number of steps, or if it is `wanted` (see `decide`). Then call
        `continue_saving`."""
        checkpointer = self._kit.checkpointer
        if wanted or checkpointer.due(state.control.step):
            checkpointer.want()
        self.continue_saving(state, member, vote)

    def continue_saving(self, state: WorkerState, member: Membership, vote: Vote) -> None:
        """Complete the present checkpoint if all members have written their parts. Then begin to write one that was
        requested, also by the vote, unless another is still being written. Members call this after each vote, also
        while they wait and make no step."""
        checkpointer, leads = self._kit.checkpointer, member.leader is not None
        if vote.save:
            checkpointer.want()
        _note_durable(state, member, checkpointer.advance(vote.writing, leads=leads))
        checkpointer.begin(state, member.layout, member.groups, self._kit.barrier)

    def finish(self, state: WorkerState, member: Membership) -> None:
        """Write the final model: the best one if it is kept, otherwise the newest. Then complete all checkpoints, and
        write one of the last step, from which a run with more steps resumes. All members call this, and return once
        everything is durable. The model comes first, so that a full volume of checkpoints does not lose it."""
        kit, groups, leader, control = self._kit, member.groups, member.leader, state.control
        best = control.best_is_kept
        tensors = {} if best else gather_model(kit.job, state, member, kit.watchdog)

        def write() -> None:
            kit.teller.catch_up()
            steps = control.best_step if best else control.step
            write_final_model(kit.job, load_best(kit.job) if best else tensors, kit.run_dir, steps=steps)

        kit.barrier.pass_after(None if leader is None else write, groups)
        checkpointer = kit.checkpointer
        _note_durable(state, member, checkpointer.complete(member.layout, groups, kit.barrier))
        if not checkpointer.due(control.step):  # otherwise the last step requested it
            checkpointer.want()
        checkpointer.begin(state, member.layout, groups, kit.barrier)
        _note_durable(state, member, checkpointer.complete(member.layout, groups, kit.barrier))
        if leader is not None:
            leader.on_finished(control)


def _note_durable(state: WorkerState, member: Membership, checkpoint: DurableCheckpoint | None) -> None:
    if member.leader is not None and checkpoint is not None:
        member.leader.tell(CheckpointWritten(state.control, checkpoint))
