"""When the model is scored, and which one is the best."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from pipetransformer_contract.conditions import field, not_both
from pipetransformer_contract.messages import Positive
from pipetransformer_contract.spec_model import Rule, SpecModel

from .names import _IMPORT_PATH


class Goal(StrEnum):
    """Which values of a metric are better."""

    HIGHEST = "Highest"
    LOWEST = "Lowest"


class Evaluation(SpecModel):
    """When held-out samples are evaluated, the metrics, and the effects on training. By default every epoch."""

    every_steps: Positive | None = Field(default=None, description="Steps between evaluations.")
    every_epochs: Positive | None = Field(
        default=None,
        description="Epochs between evaluations, instead of everySteps. By default one.",
    )
    metrics: list[Annotated[str, Field(min_length=3, max_length=253, pattern=_IMPORT_PATH)]] = Field(
        default_factory=list,
        max_length=16,
        description="Metrics in addition to loss and accuracy: module:function of (output, target, weight) that returns"
        " numerator and denominator. Each is summed over all samples.",
    )
    best_metric: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        default="accuracy",
        description="Metric that decides which evaluation is best: `accuracy`, `loss` or the name of a metric's"
        " function.",
    )
    goal: Goal = Field(default=Goal.HIGHEST, description="Which values of bestMetric are better.")
    keep_best: bool = Field(
        default=False,
        description="The final model is that of the best evaluation, not of the last step. Needs a checkpoint.",
    )
    patience: Positive | None = Field(
        default=None, description="Training ends after this many evaluations in a row without a better bestMetric."
    )
    rules = (
        Rule(
            not_both("every_steps", "every_epochs"),
            "at most one of everySteps and everyEpochs",
        ),
        Rule(
            field("best_metric").is_not("loss") | field("goal").is_("Lowest"),
            "bestMetric loss needs goal Lowest",
            ".goal",
        ),
    )
