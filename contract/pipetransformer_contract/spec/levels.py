"""The section `multiLevel` of the spec: smaller models that the job trains before its own model."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from pipetransformer_contract.cel import field
from pipetransformer_contract.messages import Positive
from pipetransformer_contract.spec_model import Rule, SpecModel


class Grouping(StrEnum):
    """Which layers, heads and channels become one in the smaller model.

    Of 12 layers with a factor of 2, Halves joins 0 with 6, 1 with 7 and so on; Adjacent joins 0 with 1, 2 with 3."""

    HALVES = "Halves"
    ADJACENT = "Adjacent"


class MultiLevel(SpecModel):
    """Trains smaller models for a while. They are made of the job's model, and then grow back into it.

    This is the V-cycle of Zou et al. (arXiv 2404.07999). Level 0 is the job's own model, and each further level is a
    smaller model. The job trains level 0, then level 1 and so on down to the smallest, then the same levels up again,
    and ends with level 0.
    """

    levels: Annotated[int, Field(ge=2, le=8)] = Field(
        default=2, description="Number of levels, including level 0, the job's own model."
    )
    depth_factor: Annotated[int, Field(ge=1, le=64)] = Field(
        default=2,
        description="How many times as many layers a level has as the next smaller level. With 1 all levels have the"
        " same number of layers.",
    )
    width_factor: Annotated[int, Field(ge=1, le=64)] = Field(
        default=2,
        description="How many times as wide a level is as the next smaller level: in attention heads and hidden sizes,"
        " while each head keeps its size. A factor above 1 needs vit, or ViT, BERT, GPT-2 or Llama of transformers. 1"
        " keeps the width, and works with every model.",
    )
    grouping: Grouping = Field(
        default=Grouping.HALVES,
        description="Which layers and heads become one, with a factor of 2: Halves joins i with i + half of them,"
        " Adjacent joins 2i with 2i + 1.",
    )
    alpha: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="When the job goes back to a larger level: share of the smaller model in the level's weights. The"
        " rest are the weights that the level had before, which are kept beside the checkpoints.",
    )
    descent_steps: Positive = Field(
        description="Number of steps of each level on the way down, except of the smallest."
    )
    ascent_steps: Positive = Field(
        description="Number of steps of each level on the way up, except of level 0, which trains all remaining steps."
    )
    ascent_learning_rate: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Highest learning rate during the ascentSteps. By default that of the optimizer.",
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
        """Number of steps before level 0 trains for the last time."""
        return (self.levels - 1) * (self.descent_steps + self.ascent_steps)
