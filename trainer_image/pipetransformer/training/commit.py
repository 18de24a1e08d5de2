"""Turns what all have voted for into committed state, and notes it in the ledger.

What a commit needs outlives the membership that it was voted in: a worker whose group broke after the vote commits the
step as the others have, in the middle of the next regroup.
"""

from collections.abc import Iterable
from pathlib import Path

import torch

from pipetransformer.errors import RunningModel
from pipetransformer.hooks import HookPoint, Reached
from pipetransformer.job.job import Job
from pipetransformer.record import Ledger
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.optimizer import learning_rate, make_optimizer, set_learning_rate
from pipetransformer.state.worker_state import WorkerState

from .gradients import Gradients
from .vote import Vote


class Committer:
    """One worker's, for as long as it lives.

    Attributes:
        pending: the lasting generation in which this worker got the complete gradients of a step that it may have
            voted for and has not committed; None for none.
        in_doubt: what this worker has assembled for a generation of which it does not know whether others committed it.
        layout: that it last trained in; None before the first.
        gradients: of what it trains there.
    """

    def __init__(self, job: Job, worker: str, run_dir: Path, reached: Reached) -> None:
        self._job = job
        self._reached = reached
        self._ledger = Ledger(run_dir, worker)
        self._optimizer: torch.optim.Optimizer | None = None
        self._committed_in: StageLayout | None = None
        self.pending: int | None = None
        self.in_doubt: WorkerState | None = None
        self.layout: StageLayout | None = None
        self.gradients: Gradients | None = None

    def equip(self, state: WorkerState, layout: StageLayout) -> Gradients:
        """Make optimizer and gradients for what `state` trains at its boundary."""
        # The old ones go before the new ones come: with gradients, and moments of units that have left.
        self._optimizer = None
        if self.gradients is None or not self.gradients.serve(state, layout):
            self.gradients = None
            self.gradients = Gradients(state, layout, self._job.no_decay)
        self._optimizer = make_optimizer(
            self._job.spec.training.optimizer,
            state.trained_parameters(),
            state.moments,
            self._job.no_decay,
            self.gradients.packs,
        )
        self.layout = layout
        return self.gradients

    def hold(self, control: Control) -> None:
        """The gradients of a round are complete. All took part in it, so the vote for another generation had failed."""
        assert self.layout is not None
        self.pending, self.in_doubt = control.lasting_generation(self.layout.number), None

    def commit(self, control: Control, vote: Vote) -> None:
        """Step the optimizer with what all voted for, advance `control`, and write the ledger.

        Raises:
            StorageError: the ledger cannot be written; the step is committed all the same.
        """
        spec, layout = self._job.spec.training, self.layout
        assert layout is not None
        rate = learning_rate(spec.optimizer, spec.learning_rate_schedule, control.step, self._job.total_steps)
        if vote.finite and self._optimizer is not None:
            assert self.gradients is not None
            self.gradients.scale(vote.gradient_scale(spec.max_gradient_norm))
            set_learning_rate(self._optimizer, rate)
            with RunningModel("step of the optimizer"):
                self._optimizer.step()
        self._reached(HookPoint.STEPPED, control.step)
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
        control.last_generation = control.lasting_generation(layout.number)
        control.skipped_steps = 0 if vote.finite else control.skipped_steps + 1
        self._committed_in = layout
        self.pending = None
        self._note(control, layout, [layout.pipeline])

    def commit_late(self, state: WorkerState, control: Control) -> None:
        """Commit the pending step as others have, and take over `control`, which says what they decided after it."""
        skipped = Vote(loss_sum=float("nan"))
        self.commit(state.control, Vote.from_list(control.last_vote) if control.last_vote else skipped)
        state.go_on_from(control)

    def note_for_the_lost(self, control: Control, layout: StageLayout) -> None:
        """Whoever died between its vote and its ledger has committed what this worker has: note it in its place.

        Raises:
            StorageError: the ledger cannot be written.
        """
        if self._committed_in is layout:
            others = [pipeline for pipeline in range(layout.pipelines) if pipeline != layout.pipeline]
            self._note(control, layout, others)

    def _note(self, control: Control, layout: StageLayout, pipelines: Iterable[int]) -> None:
        """Write what these pipelines trained in the last committed step into the ledger."""
        step = control.step - 1
        dealt = self._job.training_micro_batches(step, layout.pipelines, layout.micro_batch_size)
        for pipeline in pipelines:
            self._ledger.append(
                step=step,
                epoch=self._job.order.epoch(step),
                layout_generation=control.last_generation,
                stages=layout.stages,
                pipelines=layout.pipelines,
                pipeline=pipeline,
                sample_ids=[sample_id for micro_batch in dealt[pipeline] for sample_id in micro_batch.real_ids],
            )
