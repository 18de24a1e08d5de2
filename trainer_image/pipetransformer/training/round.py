"""One round of training: a global batch from its deal to its commit.

Deal, run the pipeline, reduce gradients, vote, commit. Until the vote everything may break and be done again; after it
everybody commits the same.
"""

import time
from dataclasses import dataclass

from pipetransformer.callbacks.callback import Teller
from pipetransformer.checkpoint.checkpointer import Checkpointer
from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler
from pipetransformer.elastic.generations.watcher import GenerationWatcher
from pipetransformer.elastic.regroup.mirrors import Mirrors
from pipetransformer.elastic.transport.exchange import SIMILARITIES, Exchange
from pipetransformer.freeze import PolicyCopy
from pipetransformer.hooks import HookPoint, Hooks
from pipetransformer.job.job import Job
from pipetransformer.metrics import Meter
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.messages import Generation

from .cache_handover import WorkerCache
from .commit import Committer
from .leader import wall_clock
from .membership import Membership
from .memory_reserve import Reserve
from .similarity import similarities
from .vote import Vote


@dataclass(frozen=True, slots=True)
class Rounds:
    """One worker's, for as long as it lives: what a round needs besides the state and the membership.

    Attributes:
        handler: told of a newer generation that the leader passes on.
        watcher: tells the leader of one.
        committer: takes what all voted for.
        checkpointer: whose writing the vote carries.
        mirrors: of which the vote settles the newest.
        teller: asked whether training is ahead of the callbacks.
        cache: handed over after a generation's first round.
        reserve: released after it.
    """

    job: Job
    handler: GenerationRendezvousHandler
    watcher: GenerationWatcher
    committer: Committer
    checkpointer: Checkpointer
    mirrors: Mirrors
    teller: Teller
    cache: WorkerCache
    reserve: Reserve
    meter: Meter
    hooks: Hooks

    def train(self, state: WorkerState, policy: PolicyCopy, member: Membership) -> Vote:
        """Train one global batch and commit it.

        Raises:
            RuntimeError: a connection broke, before or after the commit.
            ModelError, SpecError: the model, or the data, failed.
            StorageError: the ledger or the record cannot be written.
        """
        started = time.perf_counter()
        layout, control, step = member.layout, state.control, state.control.step
        self.committer.pending = None
        micro_batches = self.job.training_micro_batches(step, layout.pipelines, layout.micro_batch_size)
        reducer = member.reducer
        assert reducer is not None
        own = micro_batches[layout.pipeline]
        reducer.begin(len(own))
        member.ballots.expect()
        sums = member.runner.train(step, own, self.job.dataset.train)
        self.hooks.reached(HookPoint.COMPUTED, step)
        norms = reducer.finish()
        self.hooks.reached(HookPoint.REDUCED, step)
        similar = self._similarities(state, policy, member)
        self.committer.hold(control)
        ballot = Vote(
            saw_next=float(self._pass_on_next(member)),
            leaving=float(self.hooks.stop_requested()),
            writing=float(self.checkpointer.writing),
            loss_sum=sums.loss,
            weight=sums.weight,
            square_norms=norms,
            similarities=similar,
            behind=float(self.teller.behind),
            save=float(member.leader is not None and self.checkpointer.overdue),
        )
        vote = ballot.reduce(member.ballots)
        self.mirrors.settle()
        self.hooks.reached(HookPoint.VOTED, step)
        self.committer.commit(control, vote)
        self.cache.note(step, layout)
        if member.leader is not None:
            self.meter.on_led(control.last_step["samples"], skipped=not vote.finite)
            member.leader.on_step(control, vote, seconds=time.perf_counter() - started)
        if not member.stepped:
            self._end_pause(control, member)
        if vote.saw_next:
            self.handler.announce(Generation.model_validate_json(member.store.get("next")))
        return vote

    def _similarities(self, state: WorkerState, policy: PolicyCopy, member: Membership) -> list[float]:
        """What the policy wants to know of the first block that trains; the one worker that has it tells the others."""
        control, layout = state.control, member.layout
        if control.boundary == self.job.num_layers or not policy.needs_similarities(control.step + 1):
            return []
        micro_batches = self.job.probe_micro_batches(layout.micro_batch_size)
        front = state.units.get(control.boundary + 1)
        train, tells = self.job.dataset.train, layout.pipeline == 0
        own = similarities(member.runner, front, micro_batches, train, tells=tells)
        return Exchange(member.world, len(own), SIMILARITIES).sum(own)

    def _pass_on_next(self, member: Membership) -> bool:
        """On the leader: whether a newer generation is known; it is then in the store for the others to read."""
        if member.leader is None:
            return False
        found = self.watcher.found(self.handler.current)
        if found is None:
            return False
        member.store.set("next", found.model_dump_json(by_alias=True))
        return True

    def _end_pause(self, control: Control, member: Membership) -> None:
        """After the first step of a generation: tell how long training paused for it, and do what was put off."""
        member.stepped = True
        member.phases.lap("first step")
        pause, phases = max(0.0, wall_clock() - member.paused_at), member.phases.seconds
        self.meter.on_regrouped(member.layout.generation.reason, pause, phases, member.transfers, member.layout.rank)
        if member.leader is not None:
            member.leader.on_first_step(control, pause_seconds=pause, phases=phases, transfers=member.transfers)
        member.drop_outgrown()
        self.reserve.release()
        # The vote has shown that all have joined, so the first workers' addresses are in the store.
        self.cache.hand_over(member.layout, member.store)
