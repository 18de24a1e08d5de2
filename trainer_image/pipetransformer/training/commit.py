"""Commits the steps that all workers have voted for, and writes them into the worker's ledger.

A committer outlives generations. If a worker's connections break after the vote, other workers may have committed the
steps. The worker then commits them during the next regroup.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipetransformer.errors import RunningModel
from pipetransformer.hooks import HookPoint, Hooks
from pipetransformer.job.job import Job
from pipetransformer.record import Ledger
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.optimizer import make_optimizer, set_learning_rate
from pipetransformer.state.prediction import keep_last_gradients
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.spec import ASYNCHRONOUS

from .gradients import Gradients
from .round_start import RoundStart
from .vote import StepSums, Vote


class Committer:
    """Commits the steps of one worker, as long as the worker lives. Implements `elastic.regroup.tools.Unsettled`.

    Attributes:
        pending: number (`Control.lasting_generation`) of the generation in which steps are pending. A step is pending
            if this worker has its complete gradients, but has not committed it. None if no step is pending.
        pending_steps: number of pending steps: all steps of the round.
        in_doubt: the state that this worker assembled for generations whose votes broke. Other workers may have
            committed one of them. None if there is no such state.
        layout: the layout in which this worker last trained; None before the first.
        gradients: gradients of the parameters that this worker trains in `layout`; None before the first.
        optimizer: optimizer of these parameters; None if this worker trains none.
    """

    def __init__(self, job: Job, worker: str, run_dir: Path, hooks: Hooks) -> None:
        self._job = job
        self._hooks = hooks
        self._ledger = Ledger(run_dir, worker)
        self._committed_in: StageLayout | None = None
        #: The newest committed state, during a round whose steps change the weights before the vote; otherwise None.
        self._round_start: RoundStart | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.pending: int | None = None
        self.pending_steps = 1
        self.in_doubt: WorkerState | None = None
        self.layout: StageLayout | None = None
        self.gradients: Gradients | None = None

    def equip(self, job: Job, state: WorkerState, layout: StageLayout) -> Gradients:
        """Make the optimizer and the gradients for the parameters that train at the present boundary.

        Args:
            job: the job of the level that trains now.
            state: holds the units of this worker's stage.
            layout: the layout in which they train.

        Returns:
            The gradients. They are the same object as before if the same parameters train.
        """
        # Free the old optimizer first, because it holds moments of units that have left this worker.
        self.optimizer = self._round_start = None
        if self.gradients is None or not self.gradients.serve(state, layout):
            self.gradients = None
            pack_all = job.spec.pipeline.schedule in ASYNCHRONOUS
            self.gradients = Gradients(state, layout, job.no_decay, pack_all=pack_all)
        self.optimizer = make_optimizer(
            job.spec.training.optimizer,
            state.trained_parameters(),
            state.moments,
            job.no_decay,
            self.gradients.packs,
            predicts=job.spec.pipeline.predicts,
        )
        self.layout = layout
        return self.gradients

    def forget_pending(self) -> None:
        """Forget pending steps. Call this when a new round or generation begins: all workers then have the same
        committed state."""
        self.pending = self._round_start = None

    def drop(self, state: WorkerState) -> None:
        """Free `state` and all that steps it, and forget pending steps and the state in doubt. Call this when the
        workers return to an earlier state, so that the memory is free before that state is loaded."""
        self.forget_pending()
        self.in_doubt = self.optimizer = self.gradients = None
        state.drop_units()

    def hold(self, control: Control, steps: int = 1) -> None:
        """Note that a round is computed, so its steps are pending until the vote. Also drop the state in doubt, because
        no member has committed it: otherwise that member would not have taken part in this round.

        Args:
            control: the control state before the round.
            steps: number of steps in the round.
        """
        assert self.layout is not None
        self.pending, self.in_doubt = control.lasting_generation(self.layout.number), None
        self.pending_steps = steps

    def doubt(self, assembled: WorkerState | None) -> None:
        """Add what this worker has assembled for a generation whose vote broke to the state in doubt. It keeps units of
        an earlier such generation, because the workers that sent them may have committed that one and dropped them.

        Args:
            assembled: the state, which is empty for a leaver; None if the generation broke before it was complete.
        """
        if assembled is not None:
            self.in_doubt = assembled.joined(self.in_doubt)

    @property
    def weights(self) -> list[Tensor]:
        """All parameters that the optimizer steps."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [weight.detach() for group in groups for weight in group["params"]]

    @property
    def is_ahead(self) -> bool:
        """Whether the weights are those after steps that are not committed."""
        return self._round_start is not None and self._round_start.has_steps

    def begin_steps(self) -> None:
        """Keep the committed state, because a round of several steps changes the weights before its vote."""
        self._round_start = RoundStart(self.optimizer)

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self._job.learning_rate(step)

    def step(self, step: int, scale: float) -> None:
        """Multiply the gradients by `scale`, and step the optimizer at the learning rate of `step`."""
        if self.optimizer is None:
            return
        assert self.gradients is not None
        self.gradients.scale(scale)
        set_learning_rate(self.optimizer, self.rate(step))
        with RunningModel("step of the optimizer"):
            if self._job.spec.pipeline.predicts:
                keep_last_gradients(self.optimizer)
            self.optimizer.step()

    def go_back(self) -> None:
        """If steps that are not committed have changed the weights, restore the committed state, bit for bit. The
        result of pending steps is kept, so that `commit_late` can still commit them."""
        if self._round_start is not None:
            self._round_start.go_back()
            if self.pending is None:
                self._round_start = None

    def commit(self, control: Control, vote: Vote) -> None:
        """Commit the steps of a round: step the optimizer, advance `control`, and write the ledger.

        The optimizer does not step if the round stepped it before the vote, or if the vote is not finite.

        Raises:
            StorageError: the ledger cannot be written. The steps are committed nevertheless.
        """
        layout = self.layout
        assert layout is not None
        if self._round_start is not None:
            self._round_start = None
        else:
            if vote.finite:
                self.step(control.step, vote.gradient_scale(self._job.spec.training.max_gradient_norm))
            self._hooks.on_point(HookPoint.STEPPED, control.step)
        control.last_vote = vote.to_list() if vote.finite else []
        control.last_similarities = vote.similarities
        *control.earlier_steps, control.last_step = (
            self._line(control, control.step + number, step if vote.finite else None)
            for number, step in enumerate([*vote.earlier, vote.last] if vote.finite else [None])
        )
        control.step += vote.num_steps
        control.last_generation = control.lasting_generation(layout.number)
        control.skipped_steps = 0 if vote.finite else control.skipped_steps + 1
        self._committed_in = layout
        self.pending = None
        self._note(control, layout, [layout.pipeline])

    def _line(self, control: Control, step: int, sums: StepSums | None) -> dict[str, Any]:
        """The line of a step in the run's record. `sums` is None if the step was skipped."""
        assert self.layout is not None
        return {
            "step": step,
            "epoch": self._job.order.epoch(step),
            "samples": self._job.order.batch_size(step),
            "loss": None if sums is None else sums.loss,
            "gradient_norm": None if sums is None else sums.gradient_norm,
            "learning_rate": self.rate(step),
            "generation": self.layout.number,
            "frozen_layers": control.boundary,
            "level": self._job.at(control.visit).level,
        }

    def refuse(self, control: Control, vote: Vote) -> bool:
        """Refuse a round of several steps if one of them was not finite: restore the state from before the round.

        Its steps will be trained again, in rounds of one step each (`control.one_a_round_until`).

        Returns:
            Whether the round was refused.
        """
        if self._round_start is None or vote.finite:
            return False
        self.pending = None
        self.go_back()
        control.one_a_round_until = control.step + vote.num_steps
        return True

    def commit_late(self, state: WorkerState, control: Control) -> None:
        """Commit the pending steps, because other workers have. Then take over `control`, the control state of these
        workers, with their decisions after these steps."""
        if self._round_start is not None:
            self._round_start.go_forward()
        vote = Vote.from_list(control.last_vote) if control.last_vote else Vote(loss_sum=math.nan)
        vote.earlier = [StepSums(weight=1.0)] * (self.pending_steps - 1)  # their lines are in `control`
        self.commit(state.control, vote)
        state.take_over(control)

    def note_for_the_lost(self, control: Control, layout: StageLayout) -> None:
        """Write the newest round into this worker's ledger for all other pipelines. Their workers may have died after
        the vote, before they wrote their own ledgers. Does nothing if no round was committed in `layout`.

        Raises:
            StorageError: the ledger cannot be written.
        """
        if self._committed_in is layout:
            others = [pipeline for pipeline in range(layout.pipelines) if pipeline != layout.pipeline]
            self._note(control, layout, others)

    def _note(self, control: Control, layout: StageLayout, pipelines: Iterable[int]) -> None:
        """Write what these pipelines trained in the last committed round into the ledger."""
        for step in range(control.step - 1 - len(control.earlier_steps), control.step):
            dealt = self._job.dealer.train(step, layout.pipelines, layout.micro_batch_size)
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
