"""When layers freeze."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from pipetransformer_contract.conditions import field, given, not_both, size
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
    """From `step` until the next point, `boundary` layers are frozen. They may be more or fewer than before."""

    step: Annotated[int, Field(ge=0, le=2**53)] = Field(description="Committed steps after which the point applies.")
    boundary: Annotated[int, Field(ge=0, le=4096)] = Field(description="Frozen layers from then on.")


class FreezeTrial(SpecModel):
    """Layers that freeze stay frozen only if the loss stays on its trend. Otherwise they thaw."""

    steps: Annotated[int, Field(ge=10, le=1000)] = Field(
        description="Steps of a trial. A freeze also waits until as many steps are trained, for the trend."
    )
    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.02, description="How far the loss may be above its trend, as a share of it."
    )
    backoff: Annotated[float, Field(ge=1, le=100)] = Field(
        default=2.0,
        description="After n failed trials in a row nothing freezes for `steps * backoff^n` steps.",
    )


#: Patterns of names in the whole model.
Patterns = Annotated[list[Annotated[str, Field(min_length=1, max_length=253)]], Field(max_length=64)]


class Freeze(SpecModel):
    """Which layers no longer train; by default none. An imported policy gets `options` as keyword arguments."""

    policy: ImportPath = Field(
        default=FreezePolicyName.NONE.value,
        description="None (nothing freezes), PaperSchedule and GradientNorm (PipeTransformer), NormChange (AutoFreeze),"
        " Plasticity (Egeria), Explicit or Script (the pod's own program passes the policy). Also module:function of a"
        " policy in the trainer's image.",
    )
    alpha: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=1 / 3,
        description="PaperSchedule and GradientNorm: maximum share of the active layers that one decision freezes.",
    )
    percentile: Annotated[float, Field(ge=0, le=100)] = Field(
        default=50.0,
        description="NormChange: freezes layers before the first one whose gradient norm changes at least as much as"
        " this percentile of the active layers.",
    )
    tolerance: Annotated[float, Field(gt=0)] = Field(
        default=0.1,
        description="Plasticity: maximum change per decision of a stationary plasticity, as a share of its largest"
        " value.",
    )
    window_decisions: Annotated[int, Field(ge=2, le=1000)] = Field(
        default=3,
        description="Plasticity: number of decisions over which it is smoothed and its slope is computed. It must be"
        " stationary for as many decisions before a layer freezes.",
    )
    learning_rate_drop: Annotated[float, Field(gt=1)] = Field(
        default=10.0,
        description="Plasticity: all layers train again once the learning rate has fallen by this factor since the"
        " first freeze.",
    )
    start_after_epochs: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="Epochs before decisions begin. Freezing too early costs accuracy. By default none."
    )
    start_after_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="Steps before decisions begin, instead of startAfterEpochs."
    )
    interval_epochs: Positive | None = Field(
        default=None, description="Epochs before the first decision and between decisions. By default one."
    )
    interval_steps: Positive | None = Field(
        default=None,
        description="Steps before the first decision and between decisions, instead of intervalEpochs.",
    )
    boundaries: list[FreezePoint] = Field(
        default_factory=list,
        max_length=4096,
        description="Policy Explicit: how many layers are frozen from which step.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of an imported policy.")
    trial: FreezeTrial | None = None
    never: Patterns = Field(
        default_factory=list,
        description="Parameters that never freeze, as patterns of their names in the whole model or of modules that"
        " hold them, such as `blocks.8` or `*.adapter`. No layer from the first such one on freezes.",
    )
    always: Patterns = Field(
        default_factory=list,
        description="Parameters that never train, as patterns like those of `never`. Leading layers in which nothing"
        " is left to train are frozen from the start, also with policy None.",
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
            "policy None freezes nothing, so there is nothing to try: set a policy, or remove trial",
            ".trial",
        ),
    )

    @property
    def ignored(self) -> list[str]:
        """Fields that are set but not read, because policy None reads only `always`."""
        if self.policy != FreezePolicyName.NONE:
            return []
        return sorted(self.model_dump(by_alias=True, exclude_defaults=True, exclude={"always"}))
