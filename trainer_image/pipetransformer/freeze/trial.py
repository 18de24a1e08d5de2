"""Puts freezes on trial: after a while, a freeze stays only if the loss has kept its trend. Otherwise the layers thaw.

The trend is a line through the logarithms of losses and steps before the freeze, because losses fall about as a power
of the step. docs/decisions/0038-freezes-on-trial.md says why, and what it costs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipetransformer_contract.spec import FreezeTrial

from .policy import FreezeObservation

#: The trend follows the losses of this many trials' lengths before a freeze. With fewer its slope is too uncertain.
_WINDOW = 4
#: A trial is judged by the held-out loss if there are at least this many evaluations before it, and in it.
_FEWEST_EVALUATIONS = 4
#: A freeze can fail only if the loss is more than this many standard errors above its trend. A single outlier, however
#: large, makes only one.
_STANDARD_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a trial ended.

    Attributes:
        layers: the layers that were on trial, counted from 0.
        kept: whether these layers stay frozen.
        excess: how far the loss was above its trend, as a share of the trend; negative below it.
        held_out: whether the held-out loss was compared, and not the training loss.
    """

    layers: range
    kept: bool
    excess: float
    held_out: bool

    @property
    def words(self) -> str:
        """The verdict in words, such as "layers 3-5 thawed: training loss 2.1 % above its trend"."""
        first, last = self.layers.start, self.layers.stop - 1
        which = f"layer {first}" if first == last else f"layers {first}-{last}"
        what = ("stays" if first == last else "stay") + " frozen" if self.kept else "thawed"
        source = "held-out" if self.held_out else "training"
        side = "above" if self.excess > 0 else "below"
        return f"{which} {what}: {source} loss {abs(self.excess):.1%} {side} its trend".replace("%", " %")


@dataclass(slots=True)
class Losses:
    """A series of positive losses, each with the number of committed steps when it was measured."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, loss: float | None) -> None:
        """Append a loss, if it has a logarithm: it is not None, finite and positive."""
        if loss is not None and math.isfinite(loss) and loss > 0:
            self.steps.append(step)
            self.values.append(loss)

    def drop_before(self, step: int) -> None:
        """Forget losses of earlier steps."""
        first = next((index for index, one in enumerate(self.steps) if one >= step), len(self.steps))
        del self.steps[:first], self.values[:first]

    def count_after(self, step: int) -> int:
        """Number of losses of later steps."""
        return sum(one > step for one in self.steps)

    def excess_after(self, step: int) -> tuple[float, float]:
        """Compare the losses after `step` with the trend of the losses up to `step`.

        Returns:
            How far log(loss) is above the trend, as a mean, and the standard error of this mean. The error includes the
            noise of the losses before and after `step`, and the uncertainty of the extrapolated trend.
        """
        split = len(self.steps) - self.count_after(step)
        x, y = np.log(self.steps), np.log(self.values)
        x_mean, y_mean = x[:split].mean(), y[:split].mean()
        spread = np.square(x[:split] - x_mean).sum()
        slope = ((x[:split] - x_mean) * (y[:split] - y_mean)).sum() / spread
        above = y - (y_mean + slope * (x - x_mean))
        distance = x[split:].mean() - x_mean
        of_trend = np.square(above[:split]).sum() / (split - 2) * (1 / split + distance**2 / spread)
        of_trial = above[split:].var(ddof=1) / (len(x) - split)
        return float(above[split:].mean()), math.sqrt(of_trend + of_trial)


class Trial:
    """Puts each freeze of a policy on trial, until there are `spec.steps` losses after it.

    Only one freeze at a time is on trial; the policy's next freeze waits. After a failed trial the layers thaw. The
    policy may freeze again after `steps * backoff ** failures` steps, but no more layers than had failed. `failures` is
    the number of failed trials since the last freeze that was kept.

    Attributes:
        verdict: how a trial ended in the newest decision; None if no trial ended.
    """

    def __init__(self, spec: FreezeTrial) -> None:
        self._spec = spec
        self._training, self._held_out = Losses(), Losses()
        #: Committed steps at the freeze that is on trial (None without a trial), and the boundary before the freeze.
        self._began: int | None = None
        self._before = 0
        #: Boundary of the last failed trial; None if none has failed since a freeze was kept.
        self._failed: int | None = None
        self._failures = 0
        self._not_before = 0
        self.verdict: Verdict | None = None

    def decide(self, observation: FreezeObservation, asked: int) -> int:
        """The boundary from the next step on, if the policy asks for the boundary `asked`.

        Layers that freeze before the first step are not on trial, because there is no trend yet. If the policy lets
        layers train again, they always do.
        """
        self.verdict = None
        step, boundary = observation.step, observation.boundary
        if step == 0:
            return asked
        self._note(observation)
        if asked < boundary:
            self._forget()
            return asked
        if self._began is not None:
            return self._end_if_due(boundary)
        if self._failed is not None:
            asked = max(boundary, min(asked, self._failed))
        if asked == boundary or step < self._not_before or len(self._training.steps) < self._spec.steps:
            return boundary
        self._began, self._before = step, boundary
        return asked

    def note_loss(self, step: int, loss: float) -> None:
        """Add the loss of a step after which `decide` is not called."""
        self._training.add(step, loss)

    def next_decision(self, step: int) -> int | None:
        """The first number of committed steps, above `step`, after which the trial may end; None without a trial."""
        return None if self._began is None else max(step + 1, self._began + self._spec.steps)

    def on_trial(self, boundary: int) -> int:
        """Number of layers on trial, if `boundary` layers are frozen."""
        return 0 if self._began is None else boundary - self._before

    def _note(self, observation: FreezeObservation) -> None:
        self._training.add(observation.step, observation.loss)
        self._held_out.add(observation.step, observation.held_out_loss)
        reference = observation.step if self._began is None else self._began
        for losses in (self._training, self._held_out):
            losses.drop_before(reference + 1 - _WINDOW * self._spec.steps)

    def _end_if_due(self, boundary: int) -> int:
        """End the trial if it has enough losses. Returns the boundary from the next step on."""
        assert self._began is not None
        if self._training.count_after(self._began) < self._spec.steps:
            return boundary
        held_out = self._held_out
        later = held_out.count_after(self._began)
        evaluated = min(later, len(held_out.steps) - later) >= _FEWEST_EVALUATIONS
        excess, error = (held_out if evaluated else self._training).excess_after(self._began)
        share = math.expm1(excess)
        kept = share <= self._spec.tolerance or excess <= _STANDARD_ERRORS * error
        self.verdict = Verdict(range(self._before, boundary), kept, share, evaluated)
        before, now = self._before, self._training.steps[-1]
        if kept:
            self._began, self._failed, self._failures = None, None, 0
            return boundary
        self._failures += 1
        self._failed = boundary
        self._not_before = now + math.ceil(self._spec.steps * self._spec.backoff**self._failures)
        self._forget()
        return before

    def _forget(self) -> None:
        """End the trial, and forget all losses: once layers train again, the loss has another trend."""
        self._began, self._training, self._held_out = None, Losses(), Losses()

    def state_dict(self) -> dict[str, Any]:
        """The state of the trial, JSON-able, to resume another copy with."""
        return {
            "training": _listed(self._training),
            "held_out": _listed(self._held_out),
            "began": self._began,
            "before": self._before,
            "failed": self._failed,
            "failures": self._failures,
            "not_before": self._not_before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._training, self._held_out = _losses(state["training"]), _losses(state["held_out"])
        self._began, self._before = state["began"], int(state["before"])
        self._failed, self._failures = state["failed"], int(state["failures"])
        self._not_before = int(state["not_before"])


def _listed(losses: Losses) -> list[list[float]]:
    return [list(losses.steps), list(losses.values)]


def _losses(listed: Sequence[Sequence[float]]) -> Losses:
    steps, values = listed
    return Losses([int(step) for step in steps], list(values))
