"""The part of a `PipeTrainingJob`'s spec that the trainer reads: what to train, on what, how, and where results go.

These types are the only source of that part of the CRD, which `api` composes, and of a worker's `Env.JOB_SPEC`. The
fields cannot change while a job exists. Rules between fields are CEL and stand beside the fields (`rules`). So
`kubectl apply` and the local command refuse the same files with the same messages.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from .choose import Packing
from .conditions import Condition, exactly_one, field, given, is_true, not_both, size
from .messages import Positive
from .spec_model import Rule, SpecModel

#: Value of a name in the spec if the pod's own program passes the object to `pipetransformer.train`.
SCRIPT = "script"
#: A registered name, or `module:attribute` to import in the trainer's image.
ImportPath = Annotated[str, Field(min_length=1, max_length=253)]
_IMPORT_PATH = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"
_URL = r"^[a-z][a-z0-9+.-]*://.+"
_IS_A_LOCATION = Rule(
    field("location").starts_with("/") | field("location").matches(_URL),
    "location must be an absolute path of a mounted volume or an fsspec URL",
    ".location",
)


def _known_or_imported(name: str, known: Iterable[str]) -> Condition:
    """Whether the field holds a known name, or `module:attribute`."""
    return field(name).is_among(known) | field(name).matches(_IMPORT_PATH)


class Model(SpecModel):
    """The network. All sizes except `numLayers` are for `vit`."""

    name: ImportPath = Field(
        description="`vit`, `huggingface`, module:function of a model in the trainer's image, or `script` if the"
        " program"
        " passes the model."
    )
    path: Annotated[str, Field(max_length=4096)] = Field(
        default="",
        description="For `huggingface`: the folder or hub id of a checkpoint. Empty to start from `options`.",
    )
    architecture: Annotated[str, Field(max_length=253)] = Field(
        default="",
        description="For `huggingface`: a class of transformers, such as `GPT2LMHeadModel`, or module:function of a"
        " class that the trainer's image registers. By default the class that suits the model's type.",
    )
    num_layers: Annotated[int, Field(ge=1, le=4096)] = Field(default=12, description="Number of layers of the model.")
    hidden_size: Annotated[int, Field(ge=1, le=1048576)] = Field(default=64, description="Width of a layer (`vit`).")
    num_heads: Annotated[int, Field(ge=1, le=4096)] = Field(default=4, description="Attention heads (`vit`).")
    mlp_size: Annotated[int, Field(ge=1, le=4194304)] = Field(
        default=128, description="Width of the MLP's hidden layer (`vit`)."
    )
    patch_size: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=2,
        description="Side of a patch in pixels (`vit`).",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="Dropout probability (`vit`).")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of an imported model. For `huggingface`: its configuration, including"
        " `model_type`.",
    )
    rules = (
        Rule(
            _known_or_imported("name", ("vit", "huggingface", SCRIPT)),
            "unknown model: use vit, huggingface, module:function of a model in the trainer's image, or script",
            ".name",
        ),
        Rule(
            field("name").is_("huggingface") | (field("path").is_("") & field("architecture").is_("")),
            "path and architecture are for the model huggingface",
            ".name",
        ),
        Rule(
            (field("hidden_size") % field("num_heads")).is_(0),
            "hiddenSize must be a multiple of numHeads",
            ".hiddenSize",
        ),
    )


class Data(SpecModel):
    """The dataset that the job trains and evaluates on."""

    name: ImportPath = Field(
        description="`digits`, `text`, `huggingface`, module:function of data in the trainer's image, or `script` if"
        " the"
        " program passes the data."
    )
    path: Annotated[str, Field(max_length=4096)] = Field(
        default="",
        description="Folder or file that the dataset reads. For `huggingface` also a hub id, or a CSV, TSV, JSON lines"
        " or Parquet file.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the function that loads the data."
    )
    loader_processes: Annotated[int, Field(ge=0, le=256)] = Field(
        default=0,
        description="Processes of each worker that read the samples of its next steps during a step. They help with"
        " data that are decoded or tokenized when read. Each process needs a CPU and has a copy of the dataset object,"
        " and does not use /dev/shm. With 0 the worker reads samples within the step.",
    )
    rules = (
        Rule(
            _known_or_imported("name", ("digits", "text", "huggingface", SCRIPT)),
            "unknown dataset: use digits, text, huggingface, module:function of data in the trainer's image, or script",
            ".name",
        ),
    )


class OptimizerName(StrEnum):
    ADAMW = "AdamW"
    ADAM = "Adam"
    RMSPROP = "RMSprop"
    SGD = "SGD"


class Optimizer(SpecModel):
    """How gradients change parameters."""

    name: OptimizerName = Field(default=OptimizerName.ADAMW, description="Name of the optimizer.")
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=1e-3,
        description="Highest learning rate of the schedule.",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Weight decay: decoupled for AdamW, L2 for the others.",
    )
    no_decay: list[Annotated[str, Field(min_length=1, max_length=253)]] = Field(
        default_factory=list,
        max_length=64,
        description="Parameters without weight decay, as patterns of their names in the whole model, such as `*.bias`"
        " or `*norm*`.",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="Momentum of SGD.")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9,
        description="Adam and AdamW: decay rate of the gradient's mean.",
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.999,
        description="Adam and AdamW: decay rate of the squared gradient's mean.",
    )
    alpha: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.99,
        description="RMSprop: decay rate of the squared gradient's mean.",
    )
    epsilon: Annotated[float, Field(gt=0)] = Field(
        default=1e-8, description="Adam, AdamW and RMSprop: number added to the root."
    )


class LearningRateShape(StrEnum):
    CONSTANT = "Constant"
    LINEAR = "Linear"
    COSINE = "Cosine"


class LearningRateSchedule(SpecModel):
    """A pure function of the step: a linear warm-up, then constant, or falling to zero at the last step."""

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
        description="Clips the global gradient norm.",
    )
    max_skipped_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=10, description="Steps in a row that may be skipped because their loss or gradient is not finite."
    )
    precision: Precision = Field(
        default=Precision.FLOAT32,
        description="BFloat16 computes products in bfloat16. Weights, optimizer state and sums of gradients stay in"
        " float32.",
    )
    activation_checkpointing: bool = Field(
        default=False, description="Keeps only each layer's input, and computes its forward again for the backward."
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=0,
        description="Seed of weights, sample order and dropout. Augmentation and masking also depend on step and"
        " sample.",
    )
    rules = (
        Rule(
            exactly_one("epochs", "steps"),
            "exactly one of epochs and steps is needed",
        ),
    )


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
            _known_or_imported("policy", FreezePolicyName),
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


class ScheduleName(StrEnum):
    GPIPE = "GPipe"
    ONE_FORWARD_ONE_BACKWARD = "OneForwardOneBackward"
    INTERLEAVED = "Interleaved"
    ZERO_BUBBLE = "ZeroBubble"
    ZERO_BUBBLE_V = "ZeroBubbleV"
    TERA_PIPE = "TeraPipe"
    PIPE_OPTIM = "PipeOptim"
    PIPE_DREAM = "PipeDream"
    ASYNC_ONE_FORWARD_ONE_BACKWARD = "AsyncOneForwardOneBackward"
    AUTO = "Auto"  #: the fastest of the first five by measured costs, for each layout
    SCRIPT = "Script"  #: the pod's own program passes the schedule


#: Schedules whose weights change while other micro-batches are in flight.
ASYNCHRONOUS = (ScheduleName.PIPE_OPTIM, ScheduleName.PIPE_DREAM, ScheduleName.ASYNC_ONE_FORWARD_ONE_BACKWARD)
DEFAULT_STEPS_PER_ROUND = 16


class FrozenForward(StrEnum):
    IN_PLACE = "InPlace"  #: in the round that needs them, by the stage that holds the layers
    AHEAD = "Ahead"  #: one round before, in idle time, by every worker that has copies of the layers
    AUTO = "Auto"  #: what is faster by measured costs, for each layout


#: Schedules that give each worker several spans.
_WITH_SPANS = (ScheduleName.INTERLEAVED, ScheduleName.ZERO_BUBBLE, ScheduleName.ZERO_BUBBLE_V, ScheduleName.SCRIPT)
_DEFAULT_SPANS = 2

#: Value of `tokenSlices` if the trainer chooses the slices.
AUTO = "Auto"
_MOST_SLICES = 65536
_AUTO_OR_NUMBER = Condition(
    f"!has(self.tokenSlices) || (type(self.tokenSlices) == int"
    f" ? self.tokenSlices >= 1 && self.tokenSlices <= {_MOST_SLICES} : self.tokenSlices == '{AUTO}')",
    lambda spec: (
        spec.token_slices in (None, AUTO)
        or (isinstance(spec.token_slices, int) and 1 <= spec.token_slices <= _MOST_SLICES)
    ),
)


#: Why TeraPipe refuses a model, before its name, and after the name of one that reads pictures.
NEEDS_ORDER = "TeraPipe needs a model whose positions see only earlier ones"
READS_PICTURES = "reads pictures, whose patches have no order"


class Pipeline(SpecModel):
    """How the model is cut into stages, and how micro-batches pass through them."""

    stages: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Workers per pipeline at the start (K).",
    )
    schedule: ScheduleName = Field(
        default=ScheduleName.ONE_FORWARD_ONE_BACKWARD,
        description="Order of forwards and backwards. OneForwardOneBackward holds fewer activations than GPipe."
        " Interleaved, ZeroBubble and ZeroBubbleV give each worker several spans of layers, so that it waits less."
        " A layout that cannot run one of them runs OneForwardOneBackward. TeraPipe sends the samples of a causal model"
        " through the pipeline in slices of their tokens. PipeOptim, PipeDream and AsyncOneForwardOneBackward do not"
        " wait for the pipeline to empty at each step, so gradients are of weights some steps old, and results differ."
        " PipeOptim computes with predicted weights, PipeDream goes back with the weights of the forward, and"
        " AsyncOneForwardOneBackward uses the newest. Auto: chooses the fastest of the first five for each"
        " layout, together with spans and micro-batches, by simulating them with measured costs. It needs packing"
        " Measured, and runs OneForwardOneBackward until costs are measured. Script: the pod's own program passes the"
        " schedule.",
    )
    spans_per_worker: Annotated[int, Field(ge=2, le=64)] | None = Field(
        default=None,
        description="Interleaved and ZeroBubble: spans of layers on each worker, 2 by default. ZeroBubbleV always has"
        " 2. Script: by default as many as the program's schedule asks for.",
    )
    token_slices: int | str | None = Field(
        default=None,
        description="TeraPipe: equal slices per sample, or Auto. Auto is the default: slices are equal at first, and"
        " then planned by measured times.",
    )
    slice_multiple: Annotated[int, Field(ge=1, le=_MOST_SLICES)] | None = Field(
        default=None,
        description="TeraPipe: all slices but the last are multiples of this many tokens. By default 1/64 of a sample,"
        " at least 8.",
    )
    steps_per_round: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="PipeOptim, PipeDream and AsyncOneForwardOneBackward: steps until the pipeline empties, 16 by"
        " default. A failure repeats at most this many steps. A round also ends where an evaluation, a checkpoint, a"
        " mirror or a decision of the freeze policy is due, and at the end of an epoch.",
    )
    frozen_forward: FrozenForward = Field(
        default=FrozenForward.IN_PLACE,
        description="When frozen layers compute. InPlace: in the step that needs their output, on the stage that holds"
        " them. Ahead: one step before, whenever a worker would wait, on every worker that has memory for a copy of the"
        " frozen layers; the stages share only the layers that train. The results are the same, to the bit. Auto:"
        " chooses the faster of the two for each layout by measured costs, and needs packing Measured. Ahead and Auto"
        " exclude the schedules TeraPipe, Script, PipeOptim, PipeDream and AsyncOneForwardOneBackward.",
    )
    micro_batch_size: Positive | None = Field(
        default=None,
        description="Samples per micro-batch. By default it is chosen from globalBatchSize and stages. With packing"
        " Measured it is chosen for each layout from measurements.",
    )
    packing: Packing = Field(
        default=Packing.PAPER,
        description="Paper: halves the pipeline by PipeTransformer's rule, and cuts stages again if the remaining"
        " steps gain more than the time of ten steps. Measured: cuts stages and changes layouts by measured times, if"
        " the remaining steps gain more than the change costs.",
    )
    rules = (
        Rule(
            ~given("spans_per_worker") | field("schedule").is_among(_WITH_SPANS),
            f"spansPerWorker is for the schedules {', '.join(_WITH_SPANS)}",
            ".spansPerWorker",
        ),
        Rule(
            ~given("spans_per_worker")
            | field("schedule").is_not(ScheduleName.ZERO_BUBBLE_V.value)
            | field("spans_per_worker").is_(_DEFAULT_SPANS),
            "ZeroBubbleV has 2 spans a worker: leave spansPerWorker out",
            ".spansPerWorker",
        ),
        Rule(
            ~given("token_slices") | field("schedule").is_(ScheduleName.TERA_PIPE.value),
            "tokenSlices is for the schedule TeraPipe",
            ".tokenSlices",
        ),
        Rule(
            ~given("slice_multiple") | field("schedule").is_(ScheduleName.TERA_PIPE.value),
            "sliceMultiple is for the schedule TeraPipe",
            ".sliceMultiple",
        ),
        Rule(
            ~given("steps_per_round") | field("schedule").is_among(ASYNCHRONOUS),
            f"stepsPerRound is for the schedules {', '.join(ASYNCHRONOUS)}",
            ".stepsPerRound",
        ),
        Rule(_AUTO_OR_NUMBER, f"tokenSlices is {AUTO} or a number from 1 to {_MOST_SLICES}", ".tokenSlices"),
        Rule(
            field("schedule").is_not(ScheduleName.AUTO.value) | field("packing").is_(Packing.MEASURED.value),
            "schedule Auto needs packing Measured: it chooses by measured costs",
            ".schedule",
        ),
        Rule(
            field("frozen_forward").is_not(FrozenForward.AUTO.value) | field("packing").is_(Packing.MEASURED.value),
            "frozenForward Auto needs packing Measured: it chooses by measured costs",
            ".frozenForward",
        ),
        Rule(
            field("frozen_forward").is_(FrozenForward.IN_PLACE.value)
            | field("schedule").is_none_of((ScheduleName.TERA_PIPE, ScheduleName.SCRIPT, *ASYNCHRONOUS)),
            "frozenForward Ahead and Auto need another schedule than TeraPipe, whose slices of tokens run in place,"
            f" Script, which orders all computations itself, and {', '.join(ASYNCHRONOUS)}, which leave no idle time",
            ".frozenForward",
        ),
    )

    @property
    def num_spans(self) -> int | None:
        """Spans of each worker (V) under this schedule; None if the program's schedule says how many."""
        if self.schedule is ScheduleName.SCRIPT:
            return self.spans_per_worker
        return self.spans_per_worker or (_DEFAULT_SPANS if self.schedule in _WITH_SPANS else 1)

    @property
    def most_steps(self) -> int:
        """Most steps of a round."""
        return (self.steps_per_round or DEFAULT_STEPS_PER_ROUND) if self.schedule in ASYNCHRONOUS else 1


class CachePolicy(StrEnum):
    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class OffloadFrozen(StrEnum):
    AUTO = "Auto"
    NEVER = "Never"


class CacheDtype(StrEnum):
    FLOAT16 = "Float16"
    BFLOAT16 = "BFloat16"


class Cache(SpecModel):
    """Cache of the output of frozen layers. The first worker of every pipeline keeps it for the next epoch.

    This is the paper's AutoCache (PipeTransformer, section 3.4). A full or broken cache only costs time.
    """

    policy: CachePolicy = Field(
        default=CachePolicy.AUTO,
        description="Auto reads an entry only if measurements show that this is faster than computing it again.",
    )
    memory_bytes: Annotated[int, Field(ge=0, le=2**53)] = Field(
        default=2**30, description="Maximum size of the entries in a worker's host memory."
    )
    disk_bytes: Annotated[int, Field(ge=0, le=2**53)] = Field(
        default=0,
        description="Maximum size of the entries in files in a worker's TMPDIR. They are read ahead of their use.",
    )
    dtype: CacheDtype | None = Field(
        default=None,
        description="Keeps entries in a smaller type, which changes the loss. By default they keep their own type.",
    )
    offload_frozen: OffloadFrozen = Field(
        default=OffloadFrozen.AUTO,
        description="Auto moves frozen layers to host memory once the caches hold their outputs of a whole epoch. Then"
        " they take no memory of the accelerator, except one layer at a time when a sample is not in the cache. The"
        " host memory is the container's. The result does not change. Never keeps them on the accelerator.",
    )
    rules = (
        Rule(
            field("policy").is_not("Always") | field("memory_bytes").above(0) | field("disk_bytes").above(0),
            "policy Always needs memoryBytes or diskBytes",
            ".policy",
        ),
    )


class Checkpoint(SpecModel):
    """Where checkpoints go: a mounted folder or an fsspec URL that every worker reaches and that outlives them."""

    location: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="Absolute path of a mounted volume, or an fsspec URL."
    )
    every_steps: Positive | None = Field(
        default=None,
        description="Steps between checkpoints, in addition to those that a freeze or a resize needs. By default the"
        " measured cost decides. Training then stops for checkpoints at most 1 % of the time, and the storage writes"
        " them at most 10 % of the time. The time between two is at least one minute and at most 30 minutes.",
    )
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(default=2, description="Number of newest checkpoints to keep.")
    rules = (_IS_A_LOCATION,)


class Mirror(SpecModel):
    """Copies each stage to the next worker's host memory every N steps while there is a single pipeline.

    So a failure costs at most N steps. It needs host memory of twice a stage's state, and briefly four times. With an
    accelerator the memory is pinned, rounded up to powers of two and kept, which may double it."""

    every_steps: Positive = Field(description="Steps between copies. A failure costs at most this many steps.")


class Output(SpecModel):
    """Where results go: the model to `LOCATION/JOB/model`, and on a mounted path the run's record to `LOCATION/JOB`."""

    location: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="Absolute path of a mounted volume, or an fsspec URL."
    )
    rules = (_IS_A_LOCATION,)


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


_CYCLE_LEAVES_STEPS = Condition(
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
            "multiLevel needs spec.checkpoint: the weights of a level are kept beside the checkpoints until the model"
            " grows back",
            ".multiLevel",
        ),
        Rule(
            _CYCLE_LEAVES_STEPS,
            "multiLevel needs training.steps above (levels - 1) * (descentSteps + ascentSteps): level 0 trains what is"
            " left",
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
    """Everything that a worker knows about its job.

    `num_shards` is the largest number of pipelines (R). The data order has at least as many shards."""

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
        """Returns the value of `Env.JOB_SPEC`, without defaults.

        The trainer's image may be older than the writer, and refuses unknown fields. A default never changes within a
        version of the API."""
        return self.model_dump_json(by_alias=True, exclude_defaults=True)
