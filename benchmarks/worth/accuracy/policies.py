"""What is compared: freeze policies, with and without a trial, and their rivals.

A run is divided into eighths, and most policies decide after each of them, from `first` on. Names are keys of the
results.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from pipetransformer import Freeze

from .tasks import Task

_EIGHTH = Fraction(1, 8)
#: Plasticity needs several decisions for each layer.
_OFTEN = Fraction(1, 40)
_THIRD = 1 / 3
#: A trial has as many steps as pass between two decisions, but not fewer than the product allows.
_FEWEST_TRIAL_STEPS = 10
#: Shares of the steps that the shorter runs have.
SHORTER = (0.25, 0.375, 0.5, 0.625, 0.75)
#: The rival that nobody names, and the one that needs no operator.
FEWER_EPOCHS, TOP = "fewer_epochs", "top"
#: Ends the name of a policy whose freezes are on trial.
TRIAL = "_trial"
NONE, LORA, HEAD_ONLY, PAPER = "none", "lora", "head_only", "paper_alpha_third"


@dataclass(frozen=True)
class Policy:
    """One row of the table.

    Attributes:
        name: in the results' keys.
        family: what it is one of: `none`, `freeze`, `trial`, `fewer_epochs`, `top` or `lora`.
        share: of the whole run's steps.
        freeze: fields of `Freeze` without the instants of decisions.
        first: share of the steps before the first decision; None if it decides nothing.
        interval: share of the steps between decisions.
        frozen: layers that are frozen from the start.
        adapters: whether layers have adapters in place of weights that train.
        trial: whether a freeze is on trial.
        rate: multiplies the task's learning rate.
    """

    name: str
    family: str
    share: float = 1.0
    freeze: tuple[tuple[str, Any], ...] = ()
    first: Fraction | None = None
    interval: Fraction = _EIGHTH
    frozen: int = 0
    adapters: bool = False
    trial: bool = False
    rate: float = 1.0

    def spec(self, task: Task) -> Freeze:
        """The section `freeze` for this task."""
        if self.adapters:
            return Freeze(always=["embedding"])
        if self.frozen:
            return Freeze(policy="Explicit", boundaries=[{"step": 0, "boundary": self.frozen}])
        if self.first is None:
            return Freeze()
        interval = round(task.whole_steps * self.interval)
        fields = dict(self.freeze) | {
            "start_after_steps": max(0, round(task.whole_steps * self.first) - interval),
            "interval_steps": interval,
        }
        if self.trial:
            fields["trial"] = {"steps": max(_FEWEST_TRIAL_STEPS, interval // 2)}
        return Freeze(**fields)


def _freezing(name: str, first: Fraction, interval: Fraction = _EIGHTH, **freeze: Any) -> Iterator[Policy]:
    """The policy, and the same on trial."""
    plain = Policy(name, "freeze", freeze=tuple(freeze.items()), first=first, interval=interval)
    yield plain
    yield replace(plain, name=f"{name}{TRIAL}", family="trial", trial=True)


def _percent(share: float) -> str:
    return f"{100 * share:g}".replace(".", "_")


def policies(num_layers: int) -> dict[str, Policy]:
    """All policies by name, for a model of so many layers."""
    found = [Policy(NONE, NONE)]
    for eighths, alpha, words in (
        (1, _THIRD, "third"), (2, _THIRD, "third"), (3, _THIRD, "third"), (4, _THIRD, "third"), (2, 0.2, "fifth"),
        (4, 0.7, "seven_tenths"),
    ):  # fmt: skip
        first = eighths * _EIGHTH
        after = "" if eighths == 1 else f"_from_{_percent(float(first))}"
        found += _freezing(f"paper_alpha_{words}{after}", first, policy="PaperSchedule", alpha=alpha)
    found += _freezing("gradient_norm", 2 * _EIGHTH, policy="GradientNorm", alpha=_THIRD)
    found += _freezing("norm_change", 2 * _EIGHTH, policy="NormChange")
    found += _freezing("plasticity", _OFTEN, _OFTEN, policy="Plasticity", tolerance=0.2, window_decisions=2)
    found += [Policy(f"{FEWER_EPOCHS}_{_percent(share)}", FEWER_EPOCHS, share=share) for share in SHORTER]
    found += [Policy(f"{TOP}_{n}", TOP, frozen=num_layers - n) for n in range(1, num_layers)]
    found.append(Policy(HEAD_ONLY, TOP, frozen=num_layers, rate=10.0))
    found.append(Policy(LORA, LORA, adapters=True, rate=4.0))
    return {policy.name: policy for policy in found}
