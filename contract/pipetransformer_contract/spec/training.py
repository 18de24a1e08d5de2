"""The section `training` of the spec: length, batches, optimizer, learning rate and precision."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from pipetransformer_contract.cel import exactly_one, field
from pipetransformer_contract.messages import Positive
from pipetransformer_contract.spec_model import Rule, SpecModel


class OptimizerName(StrEnum):
    ADAMW = "AdamW"
    ADAM = "Adam"
    RMSPROP = "RMSprop"
    SGD = "SGD"


_ADAMS = (OptimizerName.ADAMW, OptimizerName.ADAM)
#: Default of each parameter that only some optimizers read, and these optimizers.
_READ_BY: dict[str, tuple[float, tuple[OptimizerName, ...]]] = {
    "momentum": (0.9, (OptimizerName.SGD,)),
    "beta1": (0.9, _ADAMS),
    "beta2": (0.999, _ADAMS),
    "alpha": (0.99, (OptimizerName.RMSPROP,)),
    "epsilon": (1e-8, (*_ADAMS, OptimizerName.RMSPROP)),
}


class Optimizer(SpecModel):
    """The optimizer, and its parameters."""

    name: OptimizerName = Field(default=OptimizerName.ADAMW, description="Name of the optimizer.")
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=1e-3,
        description="Highest learning rate of the schedule.",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Weight decay: decoupled for AdamW, an L2 penalty for the other optimizers.",
    )
    no_decay: list[Annotated[str, Field(min_length=1, max_length=253)]] = Field(
        default_factory=list,
        max_length=64,
        description="Parameters without weight decay, as patterns of their names in the whole model, such as `*.bias`"
        " or `*norm*`.",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=_READ_BY["momentum"][0], description="Momentum of SGD."
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=_READ_BY["beta1"][0],
        description="Adam and AdamW: decay rate of the gradient's mean.",
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=_READ_BY["beta2"][0],
        description="Adam and AdamW: decay rate of the squared gradient's mean.",
    )
    alpha: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=_READ_BY["alpha"][0],
        description="RMSprop: decay rate of the squared gradient's mean.",
    )
    epsilon: Annotated[float, Field(gt=0)] = Field(
        default=_READ_BY["epsilon"][0], description="Adam, AdamW and RMSprop: number added to the root."
    )


class LearningRateShape(StrEnum):
    CONSTANT = "Constant"
    LINEAR = "Linear"
    COSINE = "Cosine"


class LearningRateSchedule(SpecModel):
    """The learning rate at each step: a linear warm-up, then constant, or falling to zero after the last step."""

    shape: LearningRateShape = Field(
        default=LearningRateShape.CONSTANT,
        description="Shape of the schedule after the warm-up.",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=0,
        description="Steps of linear warm-up from zero.",
    )


class Precision(StrEnum):
    """`BFloat16` computes products in bfloat16. Weights, optimizer state and sums of gradients stay in float32."""

    FLOAT32 = "Float32"
    FLOAT64 = "Float64"
    BFLOAT16 = "BFloat16"


class Training(SpecModel):
    """How long and how to train. Exactly one of `epochs` and `steps` is needed."""

    epochs: Positive | None = Field(default=None, description="Number of passes over the training samples.")
    steps: Positive | None = Field(default=None, description="Number of global batches, instead of epochs.")
    global_batch_size: Positive = Field(default=64, description="Samples per step, in every layout.")
    optimizer: Optimizer = Field(default_factory=Optimizer)
    learning_rate_schedule: LearningRateSchedule = Field(default_factory=LearningRateSchedule)
    max_gradient_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Largest L2 norm of the whole gradient. A larger gradient is scaled down to it.",
    )
    max_skipped_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=10,
        description="Largest number of steps in a row that are skipped because their loss or gradient is not finite.",
    )
    precision: Precision = Field(
        default=Precision.FLOAT32,
        description="BFloat16 computes products in bfloat16. Weights, optimizer state and sums of gradients stay in"
        " float32.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="True: of each layer only the input is kept, and its forward is computed again for the backward.",
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=0,
        description="Seed of initial weights, sample order and dropout. Augmentation and masks of tokens depend on step"
        " and sample instead.",
    )
    rules = (
        Rule(
            exactly_one("epochs", "steps"),
            "exactly one of epochs and steps is needed",
        ),
        *(
            Rule(
                field("optimizer.name").is_among(names) | field(f"optimizer.{name}").is_(default),
                f"{name} is only for {', '.join(names)}",
                f".optimizer.{name}",
            )
            for name, (default, names) in _READ_BY.items()
        ),
    )
