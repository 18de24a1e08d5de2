"""The section `pipeline` of the spec: how layers are cut into stages, and in what order workers compute."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from pipetransformer_contract.cel import Predicate, field, given
from pipetransformer_contract.choose import Packing
from pipetransformer_contract.messages import Positive
from pipetransformer_contract.spec_model import IntOrString, Rule, SpecModel


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
    AUTO = "Auto"  #: for each layout the fastest of the first five, by measured costs
    SCRIPT = "Script"  #: the program in the pod passes its own schedule


#: Schedules whose weights change while other micro-batches are in flight.
ASYNCHRONOUS = (ScheduleName.PIPE_OPTIM, ScheduleName.PIPE_DREAM, ScheduleName.ASYNC_ONE_FORWARD_ONE_BACKWARD)
DEFAULT_STEPS_PER_ROUND = 16


class FrozenForward(StrEnum):
    IN_PLACE = "InPlace"  #: in the round that needs them, by the stage that holds the layers
    AHEAD = "Ahead"  #: one round before, in idle time, by every worker that has copies of the layers
    AUTO = "Auto"  #: for each layout the faster of the two, by measured costs


#: Schedules that give each worker several spans.
_WITH_SPANS = (ScheduleName.INTERLEAVED, ScheduleName.ZERO_BUBBLE, ScheduleName.ZERO_BUBBLE_V, ScheduleName.SCRIPT)
_DEFAULT_SPANS = 2

#: Value of `tokenSlices` if the trainer chooses the slices.
AUTO = "Auto"
_MOST_SLICES = 65536
_AUTO_OR_NUMBER = Predicate(
    f"!has(self.tokenSlices) || (type(self.tokenSlices) == int"
    f" ? self.tokenSlices >= 1 && self.tokenSlices <= {_MOST_SLICES} : self.tokenSlices == '{AUTO}')",
    lambda spec: (
        spec.token_slices in (None, AUTO)
        or (isinstance(spec.token_slices, int) and 1 <= spec.token_slices <= _MOST_SLICES)
    ),
)


#: Words of the errors if a model cannot run TeraPipe: `NEEDS_ORDER: MODEL REASON`, such as `READS_PICTURES`.
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
        " wait for the pipeline to empty at each step. So gradients belong to weights that are some steps old, and"
        " results differ from those of the other schedules. Of these three, PipeOptim computes with predicted weights,"
        " PipeDream computes a backward with the weights of its forward, and AsyncOneForwardOneBackward always uses the"
        " newest weights. Auto chooses the fastest of GPipe, OneForwardOneBackward, Interleaved, ZeroBubble and"
        " ZeroBubbleV for each layout, with spans and micro-batches, by simulations with measured costs. It needs"
        " packing Measured, and runs OneForwardOneBackward until costs are measured. Script: the program in the pod"
        " passes its own schedule.",
    )
    spans_per_worker: Annotated[int, Field(ge=2, le=64)] | None = Field(
        default=None,
        description="Interleaved and ZeroBubble: number of spans (contiguous parts of the model) on each worker, 2 by"
        " default. ZeroBubbleV always has 2. Script: by default as many as the program's schedule asks for.",
    )
    token_slices: IntOrString | None = Field(
        default=None,
        description="TeraPipe: number of equal slices of each sample, or Auto. With Auto, the default, slices are equal"
        " at first. Once times are measured, these decide the lengths.",
    )
    slice_multiple: Annotated[int, Field(ge=1, le=_MOST_SLICES)] | None = Field(
        default=None,
        description="TeraPipe: the length of each slice except the last is a multiple of this many tokens. By default"
        " 1; with tokenSlices Auto 1/64 of a sample, at least 8.",
    )
    steps_per_round: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="PipeOptim, PipeDream and AsyncOneForwardOneBackward: number of steps in a round, after which the"
        " pipeline empties; 16 by default. After a failure at most this many steps are repeated. A round also ends"
        " where an evaluation, a checkpoint, a mirror or a decision of the freeze policy is due, and at the end of an"
        " epoch.",
    )
    frozen_forward: FrozenForward = Field(
        default=FrozenForward.IN_PLACE,
        description="When frozen layers compute. InPlace: in the step that needs their output, on the stage that holds"
        " them. Ahead: one step before, while a worker would wait, on all workers that have memory for a copy of the"
        " frozen layers. The layers that train are then divided among all stages. Both give the same results, to the"
        " bit. Auto chooses the faster of the two for each layout by measured costs, and needs packing Measured. Ahead"
        " and Auto cannot be combined with the schedules TeraPipe, Script, PipeOptim, PipeDream and"
        " AsyncOneForwardOneBackward.",
    )
    micro_batch_size: Positive | None = Field(
        default=None,
        description="Number of samples in a micro-batch, at most those that a pipeline trains in a step. By default it"
        " follows from globalBatchSize and stages, and with packing Measured from measured costs, for each layout.",
    )
    packing: Packing = Field(
        default=Packing.PAPER,
        description="When pipelines get shorter. Paper, the rule of the paper PipeTransformer: a pipeline is halved if"
        " its largest stage then needs no more memory than at the start. Stages are cut again if the remaining steps"
        " gain more than the time of ten steps. Measured: layouts and stages change if, by measured times, the"
        " remaining steps gain more than the change costs.",
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
            "ZeroBubbleV always has 2 spans per worker: leave spansPerWorker out",
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
            "frozenForward Ahead and Auto cannot be combined with the schedules TeraPipe, whose slices of tokens run in"
            f" place, Script, which orders all computations itself, and {', '.join(ASYNCHRONOUS)}, which leave no idle"
            " time",
            ".frozenForward",
        ),
    )

    @property
    def num_spans(self) -> int | None:
        """Number of spans of each worker (V) with this schedule; None if the program's schedule decides it."""
        if self.schedule is ScheduleName.SCRIPT:
            return self.spans_per_worker
        return self.spans_per_worker or (_DEFAULT_SPANS if self.schedule in _WITH_SPANS else 1)

    @property
    def predicts(self) -> bool:
        """Whether some layout computes forwards with predicted weights (schedule PipeOptim)."""
        return self.schedule is ScheduleName.PIPE_OPTIM and self.stages > 1

    @property
    def most_steps(self) -> int:
        """Largest number of steps in a round."""
        return (self.steps_per_round or DEFAULT_STEPS_PER_ROUND) if self.schedule in ASYNCHRONOUS else 1
