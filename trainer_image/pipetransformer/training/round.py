"""One round of training: deal a global batch, run the pipeline, reduce gradients, vote, commit.

A round breaks when a connection does. Before the vote, a round that breaks is simply repeated. After the vote, all
workers commit the same step. Under an asynchronous schedule a round may have several steps, which change the weights
before the vote. So each worker keeps the state from before the round, and goes back to it if the round breaks.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipetransformer.data import MicroBatch
from pipetransformer.freeze import PolicyCopy
from pipetransformer.hooks import HookPoint
from pipetransformer.job.job import Job
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.messages import Generation
from pipetransformer_contract.spec import ASYNCHRONOUS

from .asynchronous import ROUND_HOOKS
from .clock import wall_clock
from .kit import Kit
from .leader_events import FirstStepTaken, LayersOffloaded, WaitingForLevel
from .membership import Membership
from .similarity import similarities
from .vote import StepSums, Vote


@dataclass(frozen=True, slots=True)
class _Computed:
    """What this worker computed in a round, before the vote.

    Attributes:
        last: this worker's part of the sums over all workers, for the last step of the round.
        norms: squared gradient norm of each unit in the last step, as `GradientReducer.finish` returns them.
        earlier: this worker's part of the sums for each earlier step of the round.
        staleness: for each step of the round, the staleness of all forwards in the pipeline; empty for a step if the
            weights change only after the round.
    """

    last: StepSums
    norms: list[float]
    earlier: list[StepSums] = field(default_factory=list)
    staleness: Sequence[Sequence[int]] = ((),)


#: How long a job pauses before each vote while it waits for longer pipelines and makes no step.
_PAUSE_SECONDS = 0.1


class Rounds:
    """Trains rounds on one worker, through all generations."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit

    def num_steps(self, state: WorkerState, policy: PolicyCopy, member: Membership) -> int:
        """The number of steps in the next round.

        Raises:
            SpecError: the policy failed.
        """
        return _steps_of_round(self._kit.job, state.control, member.layout, policy, member.first_step)

    def train(self, state: WorkerState, policy: PolicyCopy, member: Membership, steps: int = 1) -> Vote:
        """Train a round of `steps` global batches, one for each step, and commit it. Returns the vote.

        If a step in a round of several is not finite, the weights go back to the start of the round. Then only the
        first step is trained and committed.

        Raises:
            RuntimeError: a connection broke, before or after the commit.
            ModelError, SpecError: the model or the data failed.
            StorageError: the ledger or the record cannot be written.
        """
        started, kit = time.perf_counter(), self._kit
        layout, control, step = member.layout, state.control, state.control.step
        kit.committer.forget_pending()
        # Compute the round.
        computed = self._train_step(step, member) if steps == 1 else self._train_steps(step, steps, member)
        computing = member.runner.take_computing_seconds()
        similar = self._similarities(state, policy, member, steps)
        kit.committer.hold(control, steps)
        # Vote.
        ballot = Vote(
            saw_next=float(self._pass_on_next(member)),
            leaving=float(kit.hooks.stop_requested()),
            writing=float(kit.checkpointer.poll_writing()),
            loss_sum=computed.last.loss_sum,
            weight=computed.last.weight,
            square_norms=computed.norms,
            similarities=similar,
            behind=float(kit.teller.behind),
            save=float(member.leader is not None and kit.checkpointer.overdue(step + steps)),
            computing=computing,
            keeps_layers_on_device=float(kit.keeps_layers_on_device(control, layout)),
            earlier=computed.earlier,
        )
        vote = ballot.reduce(member.groups.exchange)
        round_seconds = time.perf_counter() - started
        kit.meter.on_round(computing, round_seconds)
        kit.meter.on_staleness(computed.staleness[-1])
        kit.hooks.on_point(HookPoint.VOTED, step)
        # Commit the round, or undo it.
        if kit.committer.refuse(control, vote):
            return self.train(state, policy, member)  # rounds have one step until `control.one_a_round_until`
        kit.committer.commit(control, vote)
        cached_before = control.cached_layers
        if not vote.keeps_layers_on_device:
            control.note_cached(layout.cut.prefix_layers(control.awaited_layers))
        kit.cache.note(control.step - 1, layout)
        # Tell the leader's listeners, and end the pause of a regroup.
        if member.leader is not None:
            idle_share = 1 - vote.computing / (layout.stages * layout.pipelines * round_seconds)
            member.leader.on_round(
                control,
                vote,
                seconds=time.perf_counter() - started,
                idle_share=max(0.0, idle_share),
                ahead_share=member.runner.ahead_share,
                staleness=computed.staleness,
            )
            if control.cached_layers > cached_before:
                member.leader.tell(LayersOffloaded(control))
        if not member.stepped:
            self._end_pause(control, member)
        self._announce(vote, member)
        return vote

    def _train_step(self, step: int, member: Membership) -> _Computed:
        """Compute the gradients of one global batch. The optimizer steps later, after the vote."""
        kit, reducer = self._kit, member.reducer
        assert reducer is not None
        own = self._own(step, member.layout)
        reducer.begin(member.runner.num_chunks(own))
        sums = member.runner.train(step, own, kit.job.dataset.train, reducer if reducer.sums else None)
        kit.hooks.on_point(HookPoint.COMPUTED, step)
        norms = reducer.finish()
        kit.hooks.on_point(HookPoint.REDUCED, step)
        return _Computed(StepSums(sums.loss, sums.weight), norms)

    def _train_steps(self, first: int, steps: int, member: Membership) -> _Computed:
        """Take `steps` optimizer steps from step `first` on. The pipeline does not run empty between them."""
        kit, layout, runner = self._kit, member.layout, member.runner
        assert member.reducer is not None
        kit.committer.begin_steps()
        dealt = [self._own(step, layout) for step in range(first, first + steps)]
        staleness = runner.staleness(dealt)
        hooks = ROUND_HOOKS[layout.schedule](
            kit.committer,
            member.reducer,
            first,
            [len(own) for own in dealt],
            staleness.own,
            lambda step: kit.hooks.on_point(HookPoint.STEPPED, step),
        )
        sums = runner.train_steps(first, dealt, kit.job.dataset.train, hooks)
        kit.hooks.on_point(HookPoint.COMPUTED, first)
        norms = hooks.norms or [[0.0] * layout.cut.num_units] * steps
        *earlier, last = (StepSums(one.loss, one.weight, sum(own)) for one, own in zip(sums, norms, strict=True))
        return _Computed(last, norms[-1], earlier, staleness.by_step)

    def _own(self, step: int, layout: StageLayout) -> list[MicroBatch]:
        """The micro-batches of this worker's pipeline at a step."""
        return self._kit.job.dealer.train(step, layout.pipelines, layout.micro_batch_size)[layout.pipeline]

    def agree(self, control: Control, member: Membership, *, waits: bool) -> Vote:
        """Vote without training a step: whether a newer generation exists, a member leaves or a checkpoint is overdue.

        Args:
            control: the control state.
            member: this worker's membership.
            waits: whether the job waits for longer pipelines. Then this worker first pauses a moment, and the leader
                tells the operator.

        Raises:
            RuntimeError: a connection broke.
        """
        kit = self._kit
        if waits:
            time.sleep(_PAUSE_SECONDS)
        ballot = Vote(
            saw_next=float(self._pass_on_next(member)),
            leaving=float(kit.hooks.stop_requested()),
            writing=float(kit.checkpointer.poll_writing()),
            square_norms=[0.0] * member.layout.cut.num_units,
            save=float(member.leader is not None and kit.checkpointer.overdue(control.step)),
        )
        vote = ballot.reduce(member.groups.exchange)
        if waits and member.leader is not None:
            member.leader.tell(WaitingForLevel(control))
        self._announce(vote, member)
        return vote

    def _announce(self, vote: Vote, member: Membership) -> None:
        """If the vote says that a newer generation exists, read it from the store and announce it to the rendezvous."""
        if vote.saw_next:
            self._kit.handler.announce(Generation.model_validate_json(member.store.get("next")))

    def _similarities(self, state: WorkerState, policy: PolicyCopy, member: Membership, steps: int) -> list[float]:
        """Return the similarities of samples at the first layer that trains; empty if the freeze policy asks for none.

        The worker of pipeline 0 that holds this layer computes them. All other workers receive them.
        """
        control, layout, job = state.control, member.layout, self._kit.job
        if control.boundary == job.num_layers or not job.is_last(control.visit):
            return []
        if not policy.needs_similarities(control.step + steps):
            return []
        micro_batches = job.dealer.probe(layout.micro_batch_size)
        front = state.units.get(control.boundary + 1)
        train, tells = job.dataset.train, layout.pipeline == 0
        own = similarities(member.runner, front, micro_batches, train, tells=tells)
        return member.groups.exchange.sum(own)

    def _pass_on_next(self, member: Membership) -> bool:
        """On the leader, put a newer generation into the store for the other members. Returns whether there is one.
        Always returns False on the other members."""
        if member.leader is None:
            return False
        found = self._kit.watcher.found(self._kit.handler.current)
        if found is None:
            return False
        member.store.set("next", found.model_dump_json(by_alias=True))
        return True

    def _end_pause(self, control: Control, member: Membership) -> None:
        """After the first step of a generation, report how long training paused. Then do the work that was put off to
        keep the pause short: close old groups, return spare memory, and hand over cache entries."""
        member.stepped = True
        member.phases.lap("first step")
        pause, phases = max(0.0, wall_clock() - member.paused_at), member.phases.seconds
        if not member.level_change:
            self._kit.meter.on_regrouped(
                member.layout.generation.reason, pause, phases, member.transfers, member.layout.rank
            )
        if member.leader is not None:
            member.leader.tell(FirstStepTaken(control, pause, phases, member.transfers, member.level_change))
        member.drop_outgrown()
        self._kit.reserve.release()
        # All members have voted, so the first worker of each pipeline has put its address into the store.
        self._kit.cache.hand_over(member.layout, member.store)


def _steps_of_round(job: Job, control: Control, layout: StageLayout, policy: PolicyCopy, first_step: int) -> int:
    """The number of steps in the next round. It ends as `end_of_round` says, but has a single step in these cases:

    - The schedule is synchronous.
    - The pipeline has one stage, which never waits for another.
    - A longer round had a step that was not finite. Its steps are trained again.
    - It is the first round after a regroup or a level change, because its end also ends the pause.

    Args:
        job: the job that trains.
        control: the control state.
        layout: layout of the generation.
        policy: the freeze policy, which tells after which step it decides next.
        first_step: number of committed steps when this worker's membership began (`Membership.first_step`).

    Raises:
        SpecError: the policy failed.
    """
    step = control.step
    if layout.schedule not in ASYNCHRONOUS or layout.stages == 1:
        return 1
    if step == first_step or step < control.one_a_round_until:
        return 1
    return end_of_round(job, step, policy) - step


def end_of_round(job: Job, step: int, policy: PolicyCopy) -> int:
    """Number of committed steps after an asynchronous round that begins with `step` committed steps.

    The round has as many steps as the spec allows, but only up to the next step that other work follows: an evaluation,
    a checkpoint, a mirror or a decision of the freeze policy. It also ends with an epoch and with the job.

    Raises:
        SpecError: the policy failed.
    """
    ends = [step + job.spec.pipeline.most_steps, job.total_steps]
    if (decision := policy.next_decision(step)) is not None:
        ends.append(decision)
    return min(ends + [step + interval - step % interval for interval in job.intervals])
