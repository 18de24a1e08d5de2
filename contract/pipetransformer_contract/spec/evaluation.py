"""The section `evaluation` of the spec: when the model is evaluated, and which evaluation is the best."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from pipetransformer_contract.cel import field, not_both
from pipetransformer_contract.messages import Positive
from pipetransformer_contract.spec_model import Rule, SpecModel

from .names import IMPORT_PATH


class Goal(StrEnum):
    """Whether the highest or the lowest value of a metric is the best."""

    HIGHEST = "Highest"
    LOWEST = "Lowest"


class Evaluation(SpecModel):
    """When the model is evaluated on held-out samples, the metrics, and what follows. By default every epoch."""

    every_steps: Positive | None = Field(default=None, description="Number of steps between evaluations.")
    every_epochs: Positive | None = Field(
        default=None,
        description="Number of epochs between evaluations, instead of everySteps. By default one.",
    )
    metrics: list[Annotated[str, Field(min_length=3, max_length=253, pattern=IMPORT_PATH)]] = Field(
        default_factory=list,
        max_length=16,
        description="Metrics in addition to loss and accuracy: the module:function of (output, target, weight) of each"
        " returns a numerator and a denominator. Both are summed over all samples, and the metric is their quotient.",
    )
    best_metric: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        default="accuracy",
        description="Metric that decides which evaluation is best: `accuracy`, `loss` or the name of a metric's"
        " function. For a task without accuracy, `accuracy` means `loss` with goal Lowest.",
    )
    goal: Goal = Field(
        default=Goal.HIGHEST, description="Whether the highest or the lowest value of bestMetric is the best."
    )
    keep_best: bool = Field(
        default=False,
        description="True: the final model is that of the best evaluation, not of the last step. Needs a checkpoint.",
    )
    patience: Positive | None = Field(
        default=None, description="Training ends after this many evaluations in a row without a better bestMetric."
    )
    rules = (
        Rule(
            not_both("every_steps", "every_epochs"),
            "give everySteps or everyEpochs, not both",
        ),
        Rule(
            field("best_metric").is_not("loss") | field("goal").is_("Lowest"),
            "bestMetric loss needs goal Lowest",
            ".goal",
        ),
    )
