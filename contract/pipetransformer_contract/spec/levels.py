"""The smaller models that are trained for a while."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from pipetransformer_contract.conditions import field
from pipetransformer_contract.messages import Positive
from pipetransformer_contract.spec_model import Rule, SpecModel


class Grouping(StrEnum):
    """Which layers, heads and channels become one: with a factor of 2 and 12 of them, 0 and 6, or 0 and 1."""

    HALVES = "Halves"
    ADJACENT = "Adjacent"


class MultiLevel(SpecModel):
    """Trains a smaller model for a while, which is made of the job's model and then grows back into it.

    This is the V-cycle of Zou et al. (arXiv 2404.07999). Level 0 is `model`; each further level is smaller. The job
    goes down to the smallest level and up again, and ends at level 0.
    """

    levels: Annotated[int, Field(ge=2, le=8)] = Field(default=2, description="Number of models, with the job's own.")
    depth_factor: Annotated[int, Field(ge=1, le=64)] = Field(
        default=2, description="Layers of a level over those of the next. With 1 all levels have the same layers."
    )
    width_factor: Annotated[int, Field(ge=1, le=64)] = Field(
        default=2,
        description="Width of a level over that of the next: heads and hidden sizes. The size of a head stays. It needs"
        " vit, or ViT, BERT, GPT-2 or Llama of transformers. With 1, which suits every model, the width stays.",
    )
    grouping: Grouping = Field(
        default=Grouping.HALVES,
        description="Which layers and heads become one: Halves takes i and i + half of them, Adjacent 2i and 2i + 1.",
    )
    alpha: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="Share of the smaller model in the weights when it grows. The rest are the level's own earlier"
        " weights, kept beside the checkpoints.",
    )
    descent_steps: Positive = Field(description="Steps of each level except the smallest, on the way down.")
    ascent_steps: Positive = Field(
        description="Steps of each level except level 0, on the way up. Level 0 trains the remaining steps."
    )
    ascent_learning_rate: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Highest learning rate of the ascentSteps. By default that of the optimizer.",
    )
    rules = (
        Rule(
            field("depth_factor").above(1) | field("width_factor").above(1),
            "a depthFactor or widthFactor above 1 is needed: otherwise all levels are the same model",
            ".depthFactor",
        ),
    )

    @property
    def cycle_steps(self) -> int:
        """Steps before the last visit of level 0."""
        return (self.levels - 1) * (self.descent_steps + self.ascent_steps)
