"""Commits the step that all have voted for, and notes it in the ledger.

A committer outlives its memberships: a worker whose group broke after the vote commits the step during the next
regroup, as the others have.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
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
    """One worker's committer, for as long as it lives.

    Attributes:
        pending: the lasting generation that gave this worker complete gradients of a step it has not committed; None if
            there is no such step.
        pending_steps: number of steps that are pending.
        in_doubt: the state that this worker assembled for a generation that others may have committed; None if there is
            none.
        layout: the layout that it last trained in; None before the first.
        gradients: of the parameters that it trains there.
        optimizer: of these parameters; None if there are none.
    """

    def __init__(self, job: Job, worker: str, run_dir: Path, hooks: Hooks) -> None:
        self._job = job
        self._hooks = hooks
        self._ledger = Ledger(run_dir, worker)
        self._committed_in: StageLayout | None = None
        #: The newest committed state, while a round of several steps has changed the weights already.
        self._round_start: RoundStart | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.pending: int | None = None
        self.pending_steps = 1
        self.in_doubt: WorkerState | None = None
        self.layout: StageLayout | None = None
        self.gradients: Gradients | None = None

    def equip(self, job: Job, state: WorkerState, layout: StageLayout) -> Gradients:
        """Make optimizer and gradients for what `state` trains at its boundary. `job` is the present level's."""
        # Free the old ones first, with their gradients and the moments of units that have left.
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
            predicts=job.predicts,
        )
        self.layout = layout
        return self.gradients

    def forget_pending(self) -> None:
        """Forget pending steps: a new round or generation has shown what counts."""
        self.pending = self._round_start = None

    def hold(self, control: Control, steps: int = 1) -> None:
        """Hold the complete gradients of a round, or what its steps have made. All took part in it, so none has
        committed a state that is in doubt."""
        assert self.layout is not None
        self.pending, self.in_doubt = control.lasting_generation(self.layout.number), None
        self.pending_steps = steps

    @property
    def weights(self) -> list[Tensor]:
        """All that the optimizer steps."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [weight.detach() for group in groups for weight in group["params"]]

    @property
    def is_ahead(self) -> bool:
        """Whether steps that are not committed have changed the weights."""
        return self._round_start is not None and self._round_start.has_steps

    def begin_steps(self) -> None:
        """Keep the committed state, because a round of several steps changes the weights before its vote."""
        self._round_start = RoundStart(self.optimizer)

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self._job.learning_rate(step)

    def step(self, step: int, scale: float) -> None:
        """Step the optimizer with the gradients, multiplied by `scale`, at the learning rate of `step`."""
        if self.optimizer is None:
            return
        assert self.gradients is not None
        self.gradients.scale(scale)
        set_learning_rate(self.optimizer, self.rate(step))
        with RunningModel("step of the optimizer"):
            if self._job.predicts:
                keep_last_gradients(self.optimizer)
            self.optimizer.step()

    def go_back(self) -> None:
        """If the weights were changed by steps that are not committed, go back to the committed state, bit for bit.
        Pending steps stay at hand."""
        if self._round_start is not None:
            self._round_start.go_back()
            if self.pending is None:
                self._round_start = None

    def commit(self, control: Control, vote: Vote) -> None:
        """Step the optimizer with what all voted for, unless the steps are taken already. Advance `control`, and write
        the ledger.

        Raises:
            StorageError: the ledger cannot be written. The step is committed nevertheless.
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
        """A step's line in the record. `sums` are None if it was skipped."""
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
        """If a step of a round of several was not finite, go back to the round's start, from where the steps are done
        again one by one. Returns whether it was so."""
        if self._round_start is None or vote.finite:
            return False
        self.pending = None
        self.go_back()
        control.one_a_round_until = control.step + vote.num_steps
        return True

    def commit_late(self, state: WorkerState, control: Control) -> None:
        """Commit the pending steps as the others have, and take over `control`, with what they decided after them."""
        if self._round_start is not None:
            self._round_start.go_on()
        vote = Vote.from_list(control.last_vote) if control.last_vote else Vote(loss_sum=math.nan)
        vote.earlier = [StepSums(weight=1.0)] * (self.pending_steps - 1)  # `control` has their lines
        self.commit(state.control, vote)
        state.go_on_from(control)

    def unsettled(self, state: WorkerState) -> "UnsettledStep":
        """Return what the next regroup has to settle of `state`."""
        return UnsettledStep(self, state)

    def note_for_the_lost(self, control: Control, layout: StageLayout) -> None:
        """Note the newest round for workers that died after the vote, before they could write their ledgers.

        Raises:
            StorageError: the ledger cannot be written.
        """
        if self._committed_in is layout:
            others = [pipeline for pipeline in range(layout.pipelines) if pipeline != layout.pipeline]
            self._note(control, layout, others)

    def _note(self, control: Control, layout: StageLayout, pipelines: Iterable[int]) -> None:
        """Write what these pipelines trained in the last committed round into the ledger."""
        for step in range(control.step - 1 - len(control.earlier_steps), control.step):
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


@dataclass(frozen=True, slots=True)
class UnsettledStep:
    """A worker's state with what its committer has not settled (`elastic.regroup.tools.Unsettled`)."""

    committer: Committer
    state: WorkerState

    @property
    def pending(self) -> int | None:
        return self.committer.pending

    @property
    def pending_steps(self) -> int:
        return self.committer.pending_steps

    @property
    def in_doubt(self) -> WorkerState | None:
        return self.committer.in_doubt

    def commit_late(self, control: Control) -> None:
        self.committer.commit_late(self.state, control)
