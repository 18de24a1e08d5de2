"""The section `freeze` of the spec: when layers freeze."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from pipetransformer_contract.cel import field, given, not_both, size
from pipetransformer_contract.messages import Positive
from pipetransformer_contract.spec_model import Rule, SpecModel

from .names import ImportPath, known_or_imported


class FreezePolicyName(StrEnum):
    NONE = "None"
    PAPER_SCHEDULE = "PaperSchedule"
    GRADIENT_NORM = "GradientNorm"
    NORM_CHANGE = "NormChange"
    PLASTICITY = "Plasticity"
    EXPLICIT = "Explicit"
    SCRIPT = "Script"  #: the pod's own program passes the policy


class FreezePoint(SpecModel):
    """From `step` until the next point, `boundary` layers are frozen. This may be more or fewer than before."""

    step: Annotated[int, Field(ge=0, le=2**53)] = Field(
        description="Number of committed steps after which the point applies."
    )
    boundary: Annotated[int, Field(ge=0, le=4096)] = Field(description="Number of frozen layers from then on.")


class FreezeTrial(SpecModel):
    """Makes each freeze a trial: if the loss rises above its earlier trend, the layers train again."""

    steps: Annotated[int, Field(ge=10, le=1000)] = Field(
        description="Number of steps of a trial. The trend needs as many losses before, so nothing freezes earlier."
    )
    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.02, description="How far the loss may be above its trend, as a share of the trend."
    )
    backoff: Annotated[float, Field(ge=1, le=100)] = Field(
        default=2.0,
        description="After n failed trials in a row nothing freezes for `steps * backoff^n` steps.",
    )


#: Fields that say when a policy decides.
_INSTANTS = ("start_after_epochs", "start_after_steps", "interval_epochs", "interval_steps")
#: The fields that each policy reads beside `policy`, `trial`, `never` and `always`. A policy that is named as
#: module:function reads `options`, and when it decides.
_READ: dict[str, tuple[str, ...]] = {
    FreezePolicyName.NONE: (),
    FreezePolicyName.PAPER_SCHEDULE: ("alpha", *_INSTANTS),
    FreezePolicyName.GRADIENT_NORM: ("alpha", *_INSTANTS),
    FreezePolicyName.NORM_CHANGE: ("percentile", *_INSTANTS),
    FreezePolicyName.PLASTICITY: ("tolerance", "window_decisions", "learning_rate_drop", *_INSTANTS),
    FreezePolicyName.EXPLICIT: ("boundaries",),
    FreezePolicyName.SCRIPT: (),
}
#: Patterns of parameters' or modules' names in the whole model.
Patterns = Annotated[list[Annotated[str, Field(min_length=1, max_length=253)]], Field(max_length=64)]


class Freeze(SpecModel):
    """When layers freeze. By default none does."""

    policy: ImportPath = Field(
        default=FreezePolicyName.NONE.value,
        description="What decides how many layers are frozen. None: nothing freezes. PaperSchedule and GradientNorm are"
        " the policies of the paper PipeTransformer, NormChange is that of AutoFreeze, and Plasticity that of Egeria."
        " Explicit: the field `boundaries` says it. Script: the program in the pod passes its own policy. Or"
        " module:function of a policy in the trainer's image.",
    )
    alpha: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=1 / 3,
        description="PaperSchedule and GradientNorm: largest share of the layers that still train which one decision"
        " freezes, rounded up to whole layers.",
    )
    percentile: Annotated[float, Field(ge=0, le=100)] = Field(
        default=50.0,
        description="NormChange: a decision freezes the leading layers whose gradient norm changes less than this"
        " percentile of the changes of all layers that still train.",
    )
    tolerance: Annotated[float, Field(gt=0)] = Field(
        default=0.1,
        description="Plasticity: a plasticity is stationary if it changes per decision by at most this share of its"
        " largest value.",
    )
    window_decisions: Annotated[int, Field(ge=2, le=1000)] = Field(
        default=3,
        description="Plasticity: number of decisions over which a layer's plasticity is smoothed and its slope is"
        " computed. A layer freezes once its plasticity was stationary for as many decisions.",
    )
    learning_rate_drop: Annotated[float, Field(gt=1)] = Field(
        default=10.0,
        description="Plasticity: all layers train again once the learning rate has fallen by this factor since the"
        " first freeze.",
    )
    start_after_epochs: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None,
        description="Number of epochs before decisions begin. Freezing too early costs accuracy. By default 0.",
    )
    start_after_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="Number of steps before decisions begin, instead of startAfterEpochs."
    )
    interval_epochs: Positive | None = Field(
        default=None, description="Number of epochs before the first decision and between decisions. By default one."
    )
    interval_steps: Positive | None = Field(
        default=None,
        description="Number of steps before the first decision and between decisions, instead of intervalEpochs.",
    )
    boundaries: list[FreezePoint] = Field(
        default_factory=list,
        max_length=4096,
        description="Policy Explicit: the numbers of frozen layers, and from which step on each applies.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments for a policy that is named as module:function."
    )
    trial: FreezeTrial | None = None
    never: Patterns = Field(
        default_factory=list,
        description="Parameters that never freeze, as patterns of their names or of their modules' names in the whole"
        " model, such as `blocks.8` or `*.adapter`. The first layer with such a parameter and all later layers train.",
    )
    always: Patterns = Field(
        default_factory=list,
        description="Parameters that never train, as patterns like those of `never`. If leading layers have no other"
        " parameters, they are frozen from the start, also with policy None.",
    )
    rules = (
        Rule(
            known_or_imported("policy", FreezePolicyName),
            f"unknown policy: use {', '.join(FreezePolicyName)}, or module:function of a policy in the trainer's image",
            ".policy",
        ),
        Rule(
            not_both("start_after_epochs", "start_after_steps"),
            "give startAfterEpochs or startAfterSteps, not both",
            ".startAfterSteps",
        ),
        Rule(
            not_both("interval_epochs", "interval_steps"),
            "give intervalEpochs or intervalSteps, not both",
            ".intervalSteps",
        ),
        Rule(
            field("policy").is_not("Explicit") | (given("boundaries") & size("boundaries").above(0)),
            "policy Explicit needs boundaries",
            ".boundaries",
        ),
        Rule(
            field("policy").is_not("None") | ~given("trial"),
            "policy None freezes nothing, so there is no trial: set a policy, or remove trial",
            ".trial",
        ),
    )

    @property
    def ignored(self) -> list[str]:
        """Names of fields that have no effect although they are set, because the policy does not read them."""
        own = _READ.get(self.policy, ("options", *_INSTANTS))
        common = (
            ("policy", "always") if self.policy == FreezePolicyName.NONE else ("policy", "always", "never", "trial")
        )
        return sorted(self.model_dump(by_alias=True, exclude_defaults=True, exclude={*own, *common}))
