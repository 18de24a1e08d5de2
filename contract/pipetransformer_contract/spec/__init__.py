"""The part of a `PipeTrainingJob`'s spec that the trainer reads: what to train, on what, how, and where results go.

`api` makes the CRD from these types, and a worker gets them as `Env.JOB_SPEC`. The fields cannot change while a job
exists. Rules between fields stand beside the fields (`rules`). So `kubectl apply` and the command `pipetransformer`
refuse the same files with the same messages.
"""

from typing import ClassVar

from pydantic import Field

from pipetransformer_contract.cel import Predicate, field, given, is_true
from pipetransformer_contract.messages import Positive
from pipetransformer_contract.spec_model import Rule, SpecModel

from .evaluation import Evaluation, Goal
from .freeze import Freeze, FreezePoint, FreezePolicyName, FreezeTrial
from .levels import Grouping, MultiLevel
from .model import Data, Model
from .names import SCRIPT
from .pipeline import ASYNCHRONOUS, NEEDS_ORDER, READS_PICTURES, FrozenForward, Pipeline, ScheduleName
from .storing import Cache, CacheDtype, CachePolicy, Checkpoint, Mirror, OffloadFrozen, Output
from .training import LearningRateSchedule, LearningRateShape, Optimizer, OptimizerName, Precision, Training

__all__ = [
    "ASYNCHRONOUS",
    "NEEDS_ORDER",
    "READS_PICTURES",
    "SCRIPT",
    "Cache",
    "CacheDtype",
    "CachePolicy",
    "Checkpoint",
    "Data",
    "Evaluation",
    "Freeze",
    "FreezePoint",
    "FreezePolicyName",
    "FreezeTrial",
    "FrozenForward",
    "Goal",
    "Grouping",
    "LearningRateSchedule",
    "LearningRateShape",
    "Mirror",
    "Model",
    "MultiLevel",
    "OffloadFrozen",
    "Optimizer",
    "OptimizerName",
    "Output",
    "Pipeline",
    "Precision",
    "ScheduleName",
    "TrainerSpec",
    "Training",
    "TrainingSpec",
]

_CYCLE_LEAVES_STEPS = Predicate(
    "!has(self.multiLevel) || (has(self.training.steps) && self.training.steps > (self.multiLevel.levels - 1) *"
    " (self.multiLevel.descentSteps + self.multiLevel.ascentSteps))",
    lambda spec: (
        spec.multi_level is None
        or (spec.training.steps is not None and spec.training.steps > spec.multi_level.cycle_steps)
    ),
)


class TrainingSpec(SpecModel):
    """The part of a job's spec that the operator and the trainer both read."""

    model: Model
    data: Data
    training: Training
    freeze: Freeze = Field(default_factory=Freeze)
    pipeline: Pipeline = Field(default_factory=Pipeline)
    cache: Cache = Field(default_factory=Cache)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    checkpoint: Checkpoint | None = None
    mirror: Mirror | None = None
    multi_level: MultiLevel | None = None
    output: Output | None = None
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field("pipeline.stages").at_most(field("model.num_layers")),
            "a pipeline cannot have more stages than the model has layers (model.numLayers)",
            ".pipeline.stages",
        ),
        Rule(
            given("checkpoint") | ~is_true("evaluation.keep_best"),
            "keepBest needs spec.checkpoint: the best model is kept beside the checkpoints",
            ".evaluation.keepBest",
        ),
        Rule(
            field("pipeline.schedule").is_not(ScheduleName.TERA_PIPE.value) | field("model.name").is_not("vit"),
            f"{NEEDS_ORDER}: vit {READS_PICTURES}",
            ".pipeline.schedule",
        ),
        Rule(
            field("pipeline.schedule").is_none_of(ASYNCHRONOUS) | ~given("training.max_gradient_norm"),
            f"maxGradientNorm needs another schedule than {', '.join(ASYNCHRONOUS)}: each stage steps before the norm"
            " of the whole gradient is known",
            ".training.maxGradientNorm",
        ),
        Rule(
            field("pipeline.schedule").is_none_of(ASYNCHRONOUS) | ~is_true("training.activation_checkpointing"),
            f"activationCheckpointing needs another schedule than {', '.join(ASYNCHRONOUS)}: a repeated forward would"
            " use other weights",
            ".training.activationCheckpointing",
        ),
        Rule(
            ~given("multi_level") | given("checkpoint"),
            "multiLevel needs spec.checkpoint: the weights of each larger level are kept beside the checkpoints while"
            " smaller levels train",
            ".multiLevel",
        ),
        Rule(
            _CYCLE_LEAVES_STEPS,
            "multiLevel needs training.steps above (levels - 1) * (descentSteps + ascentSteps): at the end level 0"
            " trains the remaining steps",
            ".multiLevel",
        ),
        Rule(
            field("pipeline.schedule").is_none_of(ASYNCHRONOUS) | ~given("multi_level"),
            f"multiLevel needs another schedule than {', '.join(ASYNCHRONOUS)}: a model changes only between steps that"
            " all stages have finished",
            ".multiLevel",
        ),
    )


class TrainerSpec(TrainingSpec):
    """The spec as a worker gets it, with two values that the operator adds.

    `num_shards` is the largest number of pipelines (R); the data's order has at least as many shards. `workers` is the
    number of workers at the start."""

    num_shards: Positive = 1
    workers: Positive = 1
    rules = (
        *TrainingSpec.rules,
        Rule(
            field("num_shards").at_most(field("training.global_batch_size")),
            "globalBatchSize must be at least the largest number of pipelines",
            ".training.globalBatchSize",
        ),
    )

    def to_environment(self) -> str:
        """Returns the value of `Env.JOB_SPEC`. Fields with their default value are left out.

        The trainer's image may be older than the operator, and refuses fields that it does not know. A default never
        changes within a version of the API."""
        return self.model_dump_json(by_alias=True, exclude_defaults=True)
