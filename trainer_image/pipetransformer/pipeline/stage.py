"""One worker's stage of a pipeline: a contiguous span of units."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.cache import FrozenPrefix
from pipetransformer.errors import BrokenGroupError, RunningModel
from pipetransformer.models import MicroBatchContext, run_unit, set_micro_batch

from .choice import ScheduleClass


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The facts of a stage that do not change while its runner lives.

    Attributes:
        stage: index of this stage among `stages`.
        span: the contiguous units that this stage holds.
        boundary: number of frozen layers.
        schedule: the schedule, if there are several stages and at least as many micro-batches; otherwise GPipe runs.
        group: the workers of the pipeline in stage order.
        dtype: type of parameters and activations.
        autocast: type to compute products in; None for `dtype`.
        recompute: whether units that train repeat their forward for their backward.
    """

    stage: int
    stages: int
    span: range
    boundary: int
    schedule: ScheduleClass
    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None = None
    recompute: bool = False

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


class StageModule(nn.Module):
    """The units of a stage in order. Frozen units keep no graph, and each micro-batch has a context.

    On the first stage the frozen units are the `prefix`, which reads the micro-batches' samples.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        blocks: Sequence[bool],
        num_frozen: int,
        prefix: FrozenPrefix | None,
        *,
        sends: bool = False,
    ) -> None:
        """
        Args:
            units: by their names in the model.
            blocks: for each unit, whether it is a layer.
            num_frozen: number of frozen units.
            prefix: the frozen units, on a first stage.
            sends: whether the output is sent to another worker.
        """
        super().__init__()
        self.names = list(units)
        self.units = nn.ModuleList(units.values())
        self.blocks = blocks
        self.checked = False
        self.num_frozen = num_frozen
        self.frozen = [] if prefix is not None else list(self.units)[:num_frozen]
        self.active = list(enumerate(self.units))[num_frozen:]
        self.prefix = prefix
        self.sends = sends
        self.upcoming: list[MicroBatchContext] = []
        self.passed: Callable[[int], None] | None = None
        #: Shape and type of activations between the units.
        self.activation: tuple[tuple[int, ...], torch.dtype] = (), torch.float32

    def forward(self, x: Tensor | None) -> Tensor:
        context, number = self.upcoming.pop(0), 0
        try:
            if self.prefix is not None:
                x = self.prefix.take()
            assert x is not None
            set_micro_batch(context)
            if self.frozen:
                with torch.no_grad():
                    for number, unit in enumerate(self.frozen):  # noqa: B007 - an error names it
                        x = run_unit(unit, x)
            for number, unit in self.active:
                if self.passed is not None and x.grad_fn is not None:
                    # Autograd goes backwards, so all gradients of the unit are complete by then.
                    x.register_hook(partial(_tell, self.passed, number))  # type: ignore[no-untyped-call]
                output = run_unit(unit, x)
                if not self.checked:
                    _check(x if self.blocks[number] else None, output)
                    if self.names[number] == "embedding":
                        _check_embedding(output, *self.activation)
                x = output
        except Exception:  # only here the failing unit is known
            with RunningModel(f"forward of {self.names[number]}"):
                raise
        # Shapes are static, but may differ between training and evaluation.
        self.checked = torch.is_grad_enabled()
        return x.contiguous() if self.sends else x  # groups cannot send views


def _check(x: Tensor | None, output: object) -> None:
    """Check that a layer keeps the shape and type of its input, because a model may be cut between any two layers. `x`
    is None if the unit is not a layer.

    Raises:
        TypeError, ValueError: the output is not a tensor, or has another shape or type.
    """
    if not isinstance(output, Tensor):
        raise TypeError(f"it returns a {type(output).__name__}, not one tensor")
    if x is not None and (output.shape, output.dtype) != (x.shape, x.dtype):
        ours, theirs = (f"{tuple(tensor.shape)} in {tensor.dtype}" for tensor in (output, x))
        raise ValueError(f"it returns {ours} for {theirs}: all layers must keep the shape and type of their input")


def _check_embedding(output: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that the embedding's output has the model's activation shape and the parameters' type.

    Raises:
        ValueError: it has not.
    """
    if (output.shape, output.dtype) != (shape, dtype):
        ours = f"{tuple(output.shape[1:])} in {output.dtype}"
        raise ValueError(f"it returns {ours} for a sample, but the model's activation is {shape[1:]} in {dtype}")


def _tell(passed: Callable[[int], None], number: int, _: Tensor) -> None:
    try:
        passed(number)
    except RuntimeError as error:
        raise BrokenGroupError(str(error)) from error
