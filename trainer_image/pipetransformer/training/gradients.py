"""The gradients of a worker's stage: one buffer for all of them, and their sum over the workers that hold the stage.

Each step clears gradients, computes norms, scales, and sums over replicas. With one buffer this work touches a few
large tensors instead of hundreds of small ones.

Units are summed in buckets. The sum of a bucket starts as soon as the last micro-batch's backward has passed all its
units. It runs while the backward continues in lower units.
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.elastic.transport.groups import GenerationGroups, wait_for
from pipetransformer.models import unit_name
from pipetransformer.pipeline import RoundHooks
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.packed_parameters import Pack, packing_order
from pipetransformer.state.worker_state import WorkerState

#: Smallest size of a bucket, except the last. A collective costs more than sending the bytes of a small unit.
_BUCKET_BYTES = 1 << 20


class Gradients:
    """One buffer for the gradients of all parameters that a worker trains. Each parameter's gradient is a view of it.

    The gradients are undefined until `clear` is called. Parameters that units share are not in the buffer. Each copy of
    them has its own gradient. The buffer is used as long as the worker's units and boundary stay. It may outlive the
    process group: a step that was voted for can still be committed after a connection broke.

    Attributes:
        parameters: by unit, its trained parameters that no other unit shares. The last unit comes first, as in a
            backward.
        packs: groups of these parameters; an optimizer may step each group as one tensor. With `pack_all` each
            parameter is in a pack. A step then does not change the version counter of the parameter, so autograd
            allows a backward after the step, with the newest weights.
        of_unit: by unit, its part of the buffer, a tensor of shape (elements,). The units have the same order as in
            `parameters`, and neighbouring parts are adjacent in memory.
    """

    def __init__(
        self, state: WorkerState, layout: StageLayout, no_decay: Collection[str] = (), *, pack_all: bool = False
    ) -> None:
        self._no_decay = no_decay
        groups = {index: _own_parameters(state, index, no_decay) for index in reversed(layout.units)}
        self.parameters = {
            index: [parameter for group in some for parameter in group.values()] for index, some in groups.items()
        }
        self._shared = _shared_parameters(state, layout.units)
        trained = [parameter for parameters in self.parameters.values() for parameter in parameters]
        sizes = [parameter.numel() for parameter in trained]
        for parameter in trained:
            parameter.grad = None  # frees an older buffer before this one is made
        self._flat = trained[0].new_empty(sum(sizes)) if trained else torch.empty(0, dtype=torch.float32)
        self._views = [
            (parameter, part.view_as(parameter))
            for parameter, part in zip(trained, torch.split(self._flat, sizes), strict=True)
        ]
        packable = [group for some in groups.values() for group in some]
        parts = torch.split(self._flat, [sum(parameter.numel() for parameter in group.values()) for group in packable])
        self.packs = [
            Pack(group, part) for group, part in zip(packable, parts, strict=True) if pack_all or len(group) > 1
        ]
        units = [sum(parameter.numel() for parameter in parameters) for parameters in self.parameters.values()]
        self.of_unit = dict(zip(self.parameters, torch.split(self._flat, units), strict=True))

    @property
    def device(self) -> torch.device:
        """The device of the buffer."""
        return self._flat.device

    def serve(self, state: WorkerState, layout: StageLayout) -> bool:
        """Whether the parameters of these gradients are exactly those that `state` trains in `layout`."""
        held = [*(parameter for some in self.parameters.values() for parameter in some), *self._shared]
        trained = [
            parameter
            for index in reversed(layout.units)
            for group in _own_parameters(state, index, self._no_decay)
            for parameter in group.values()
        ]
        trained += _shared_parameters(state, layout.units)
        return [id(parameter) for parameter in held] == [id(parameter) for parameter in trained]

    def clear(self) -> None:
        """Set all gradients to zero. Call this before each step."""
        self._flat.zero_()
        for parameter, view in self._views:
            if parameter.grad is not view:  # in the first round, or when user code replaced it
                parameter.grad = view
        for parameter in self._shared:
            parameter.grad = None

    def scale(self, factor: float) -> None:
        """Multiply all gradients, including those of shared parameters."""
        self._flat.mul_(factor)
        for parameter in self._shared:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def square_norms(self, units: Sequence[int]) -> list[float]:
        """Return the squared gradient norm of each of these units, without shared parameters. Waits once for the
        device."""
        if not units:
            return []
        norms = torch.stack(torch._foreach_norm([self.of_unit[index] for index in units]))
        return [norm * norm for norm in norms.tolist()]

    def joined(self, units: list[int]) -> Tensor:
        """Return the parts of these units as one tensor that shares their memory. They must be adjacent in
        `of_unit`."""
        parts = [self.of_unit[index] for index in units]
        start = parts[0].storage_offset()
        return self._flat[start : start + sum(part.numel() for part in parts)]


def _own_parameters(state: WorkerState, index: int, no_decay: Collection[str]) -> list[dict[str, nn.Parameter]]:
    """Return a unit's trained parameters that no other unit shares, in groups that may be packed. Keys are names in the
    whole model."""
    prefix = unit_name(index, state.num_layers)
    own = {
        f"{prefix}.{name}": parameter
        for name, parameter in state.units[index].named_parameters()
        if parameter.requires_grad and state.ties.find(index, name) is None
    }
    return [{name: own[name] for name in names} for names in packing_order(own, no_decay)]


def _shared_parameters(state: WorkerState, units: Collection[int]) -> list[nn.Parameter]:
    return [
        parameter
        for tie in state.ties.all
        for unit, name in tie.places
        if unit in units and (parameter := state.units[unit].get_parameter(name)).requires_grad
    ]


class GradientReducer(RoundHooks):
    """Sums the gradients of a worker's stage. A change of the worker's units or boundary needs a new reducer.

    The gradients of a parameter that units share are summed over all workers that hold a copy. All workers start the
    sums in the same order, the last unit first.

    Args:
        gradients: the gradients to sum.
        state: holds the parameters of these gradients.
        layout: layout of the generation.
        groups: process groups of the generation.
    """

    def __init__(self, gradients: Gradients, state: WorkerState, layout: StageLayout, groups: GenerationGroups) -> None:
        assert groups.data_parallel is not None
        self._gradients, self._state, self._layout, self._groups = gradients, state, layout, groups
        self._group = groups.data_parallel
        #: The units whose norms this worker computes.
        self._counted = list(gradients.of_unit)[layout.pipeline :: layout.pipelines]
        #: Empty with one pipeline, which has no replica to sum with.
        self._buckets = _buckets(gradients) if self._group.size() > 1 else []
        #: The last unit of each bucket that a backward passes.
        self._ends = {units[-1] for units in self._buckets}
        self._bucket_of = {unit: number for number, units in enumerate(self._buckets) for unit in units}
        self._flats = [gradients.joined(units) for units in self._buckets]
        #: For each bucket, how many backwards of its units are still missing before its sum can start. A backward
        #: counts once for each unit and micro-batch. Empty between rounds.
        self._missing: list[int] = []
        self._sums: list[dist.Work] = []

    @property
    def sums(self) -> bool:
        """Whether other pipelines hold the same stage, so that gradients are summed and `passed` must be called."""
        return bool(self._buckets)

    @property
    def under_way(self) -> list[int]:
        """Indices of the units whose sums have started in this round."""
        return [index for units in self._buckets[: len(self._sums)] for index in units]

    def begin(self, num_micro_batches: int) -> None:
        """Begin a step: set all gradients to zero. Each unit will have `num_micro_batches` backwards. If the schedule
        cuts micro-batches into slices of tokens, each slice counts."""
        self._gradients.clear()
        self._missing = [num_micro_batches * len(units) for units in self._buckets]
        self._sums = []

    def finish(self) -> list[float]:
        """Wait until all sums are complete. The parameters' gradients are the sums then.

        Returns:
            Squared norm of the summed gradient for each unit of the model. The pipelines share the work: each computes
            the norms of some units. The others are 0, also those of units that this worker does not hold. So a sum over
            all workers counts each parameter once. A parameter that units share counts in its last unit, in the first
            pipeline.

        Raises:
            RuntimeError: a connection broke.
        """
        while len(self._sums) < len(self._buckets):
            self._start()
        for work in self._sums:
            work.wait()
        wait_for(self._gradients.device)  # a worker that votes says that its gradients are complete
        self._missing, self._sums = [], []
        norms = [0.0] * (self._state.num_layers + 2)
        for index, square_norm in zip(self._counted, self._gradients.square_norms(self._counted), strict=True):
            norms[index] = square_norm
        counts = self._layout.pipeline == 0
        units, cut = self._layout.units, self._layout.cut
        for tie in self._state.ties.all:
            copies = [self._state.units[unit].get_parameter(name) for unit, name in tie.places if unit in units]
            if copies:
                square_norm = reduce_tied_gradients(copies, self._groups.tied[tie.stages(cut.units_by_stage)])
                norms[tie.last_unit] += square_norm if counts and tie.last_unit in units else 0.0
        return norms

    def sum_over_pipelines(self, value: Tensor) -> float:
        """Sum a number over the workers that hold the same stage. All of them must call this at the same point, between
        `finish` and `begin`.

        Raises:
            RuntimeError: a connection broke.
        """
        if self._group.size() > 1:
            value = value.clone()  # the caller's tensor may still be on its way to another worker
            dist.all_reduce(value, group=self._group)
        return float(value)

    def close(self) -> None:
        """Forget the sums of a round that broke. A backward that still runs starts no more."""
        self._missing, self._sums = [], []

    def awaits(self, unit: int) -> bool:
        return unit in self._ends

    def passed(self, unit: int) -> None:
        """Note that the backward of a micro-batch has passed this unit. Starts the sums of all buckets that are
        complete."""
        if not self._missing or unit not in self._bucket_of:
            return
        self._missing[self._bucket_of[unit]] -= 1
        # A bucket waits for earlier buckets, so that all workers start the sums in the same order.
        while len(self._sums) < len(self._missing) and not self._missing[len(self._sums)]:
            self._start()

    def _start(self) -> None:
        # The group's own method takes half the time of `dist.all_reduce`.
        self._sums.append(self._group.allreduce([self._flats[len(self._sums)]]))


def _buckets(gradients: Gradients) -> list[list[int]]:
    """Group the units that train into buckets of at least `_BUCKET_BYTES`, in the order of the buffer."""
    buckets: list[list[int]] = []
    filled = _BUCKET_BYTES
    for index, part in gradients.of_unit.items():
        if not part.numel():
            continue
        if filled >= _BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += part.nbytes
    return buckets


def reduce_tied_gradients(copies: Sequence[nn.Parameter], group: dist.ProcessGroup) -> float:
    """Give all copies of a shared parameter the sum of their gradients, computed at least in float32. Returns the
    squared norm of the sum, 0 if the parameter is frozen.

    Args:
        copies: the copies that this worker holds.
        group: process group of all workers that hold a copy.
    """
    if not copies[0].requires_grad:
        return 0.0
    dtype = torch.promote_types(copies[0].dtype, torch.float32)
    # Contiguous, because it is sent to other workers.
    total = torch.zeros_like(copies[0], dtype=dtype, memory_format=torch.contiguous_format)
    for copy in copies:
        if copy.grad is not None:
            total += copy.grad
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    for copy in copies:
        copy.grad = total.to(copy.dtype, copy=True)
    return float(total.double().square().sum())
