"""The form of each model that can be trained: embedding, layers, head.

These L + 2 units are the smallest parts that can be moved, frozen or saved. Unit 0 is the embedding, units 1..L are the
layers, unit L + 1 is the head.
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from pipetransformer.data import NO_TARGET, byte_tensor

from .ties import Ties

#: Number of values of a tensor that tell whether a model is built with other weights.
_COMPARED = 32


def unit_name(index: int, num_layers: int) -> str:
    """Name of a unit in the whole model: `embedding`, `blocks.3`, `head`. Names of its parameters begin with it.

    Raises:
        IndexError: there is no such unit.
    """
    if not 0 <= index <= num_layers + 1:
        raise IndexError(f"unit {index} of a model with {num_layers} layers")
    if index == 0:
        return "embedding"
    return "head" if index == num_layers + 1 else f"blocks.{index - 1}"


@dataclass
class PipelineModel:
    """A model as a list of units, each of which maps one tensor to one tensor.

    Replace `loss` and `correct` in a subclass if the model is not a classifier. There is no accuracy if targets are
    floating-point numbers and `correct` is not replaced. Parameters that require no gradient become buffers and never
    train. Parameters that units share are found when the model is created. Units that a worker does not hold are on the
    meta device.

    Attributes:
        embedding: the first unit.
        blocks: the layers.
        head: the last unit.
        activation: shape of the output of the embedding and of each layer, without the batch dimension.
        ties: the parameters that units share.
        slices_tokens: whether the units can run slices of tokens, as `schedule: TeraPipe` needs. Then the second
            dimension of inputs, activations, outputs and targets must be positions. A position sees only itself and
            earlier ones, which a layer gets from `with_earlier`. Positions come from
            `current_micro_batch().places(...)`. `loss` and its weight are sums over positions.
    """

    embedding: nn.Module
    blocks: list[nn.Module]
    head: nn.Module
    activation: tuple[int, ...]
    ties: Ties = field(init=False)
    _first_values: Mapping[int, Mapping[str, Tensor]] = field(init=False, repr=False, default_factory=dict)
    slices_tokens: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.activation, tuple | list):
            raise TypeError(f"activation is {self.activation!r}, not a shape such as (positions, channels)")
        for unit in self.units:
            _move_constants_to_buffers(unit)
        self.ties = Ties.of(self.units)

    @property
    def num_layers(self) -> int:
        """Number of layers (L)."""
        return len(self.blocks)

    @property
    def units(self) -> list[nn.Module]:
        """Embedding, layers and head, in order."""
        return [self.embedding, *self.blocks, self.head]

    def with_units(self, units: Mapping[int, nn.Module]) -> "PipelineModel":
        """A copy of this model, and its other attributes, where `units` (by index) replace its own units."""
        model = copy.copy(self)
        model.embedding, *model.blocks, model.head = [units.get(index, unit) for index, unit in enumerate(self.units)]
        for unit in model.units:
            _move_constants_to_buffers(unit)
        return model

    def with_constants(self, names: Collection[tuple[int, str]]) -> "PipelineModel":
        """A copy of this model in which these parameters never train. This model stays unchanged.

        Args:
            names: (unit, name inside the unit) of each parameter. Of a shared parameter, name all copies or none.
        """
        units = copy.deepcopy(dict(enumerate(self.units)))
        fix_constants(units, names)
        model = self.with_units(units)
        model.ties = Ties(tuple(tie for tie in self.ties.all if not names or tie.places[0] not in names))
        return model

    def with_layers(self, count: int) -> "PipelineModel":
        """A copy of this model with only its first `count` layers. It shares their weights: replace them."""
        model = copy.copy(self)
        model.blocks = self.blocks[:count]
        kept = {**{unit: unit for unit in range(count + 1)}, self.num_layers + 1: count + 1}
        model.ties = self.ties.among(kept)
        return model

    def shell(self) -> "PipelineModel":
        """A copy on the meta device. Buffers outside of `state_dict` keep their values, because workers do not send
        them with a unit. This model stays unchanged, because the user's code may return its modules again.

        Raises:
            ValueError: a tensor cannot be copied, because it has no shape yet, is the result of a computation, or has a
                hook.
        """
        memory: dict[int, Tensor] = {}
        for index, unit in enumerate(self.units):
            _check_tensors(unit, self.unit_name(index))
            for tensor in unit.state_dict(keep_vars=True).values():
                empty = torch.empty_like(tensor, device="meta")
                memory[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        shell = self.with_units({index: copy.deepcopy(unit, dict(memory)) for index, unit in enumerate(self.units)})
        shell._first_values = {index: _first_values(unit) for index, unit in enumerate(self.units)}
        return shell

    def check_built(self, units: Mapping[int, nn.Module]) -> None:
        """Check that units (by index) were built with the weights of the model that this shell was made of.

        Raises:
            ValueError: a parameter or buffer has other first values. Other workers would start from yet others.
        """
        for index, unit in units.items():
            before = self._first_values.get(index, {})
            for name, values in _first_values(unit).items():
                if name in before and not torch.equal(byte_tensor(values), byte_tensor(before[name])):
                    raise ValueError(
                        f"{self.unit_name(index)}.{name} has other values each time that the model is built, but all"
                        " workers must start from the same: draw by torch, numpy.random or random, which are seeded"
                    )

    def first_sums(self) -> list[float]:
        """For each unit, a sum of first values of its parameters and buffers. Workers compare them.

        Empty unless `shell` made this model. Workers compare sums, because processors round differently.
        """
        return [sum(map(_sum_of, of_unit.values())) for _, of_unit in sorted(self._first_values.items())]

    def unit_name(self, index: int) -> str:
        """Name of a unit in the whole model. A parameter's whole-model name is `blocks.3.` + its name in the unit."""
        return unit_name(index, self.num_layers)

    def activation_shape(self, micro_batch: int, length: int | None = None) -> tuple[int, ...]:
        """Shape of an activation for `micro_batch` samples, with `length` positions if it is not None."""
        return (micro_batch, *(self.activation if length is None else (length, *self.activation[1:])))

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum of the losses of all targets, and the sum of their weights. The trainer divides the sum of
        losses by the weight of the whole global batch.

        Args:
            output: (micro-batch, ..., classes) logits.
            target: (micro-batch, ...) class indices; -100 for a target that is ignored. Or (micro-batch, ..., classes)
                probabilities of the classes.
            weight: (micro-batch,) 1, or 0 for a sample that only pads the micro-batch.

        Raises:
            TypeError: targets are neither classes nor probabilities of all classes.
            ValueError: a target is not the number of an output.
        """
        if target.is_floating_point():
            if target.shape != output.shape:
                raise TypeError(
                    f"targets are {target.dtype} of shape {tuple(target.shape)}, but those of a classifier are whole"
                    f" numbers, or probabilities of the shape of its outputs, {tuple(output.shape)}. For another loss,"
                    " return a PipelineModel that replaces `loss`"
                )
            losses = functional.cross_entropy(output.flatten(0, -2), target.flatten(0, -2), reduction="none")
            weights = target_weights(torch.zeros_like(target[..., 0]), weight).flatten()
        else:
            classes = target.long()  # data may have smaller whole numbers
            try:
                losses = functional.cross_entropy(output.flatten(0, -2), classes.flatten(), reduction="none")
            except IndexError as error:
                known = output.shape[-1]
                raise ValueError(f"{error} The model has {known} outputs, for the classes 0 to {known - 1}") from None
            weights = target_weights(target, weight).flatten()
        return torch.dot(losses, weights.to(losses.dtype)), weights.sum()

    def correct(self, output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Summed weight of the targets that `output` gets right, as a scalar.

        Args:
            output: (micro-batch, ..., classes) logits.
            target: (micro-batch, ...) class indices; -100 for a target that is ignored.
            weight: (micro-batch,) 1, or 0 for a sample that only pads the micro-batch.

        Raises:
            ValueError: outputs and targets differ in number.
        """
        classes = output.argmax(dim=-1)
        if target.numel() != classes.numel():
            raise ValueError(
                f"targets of shape {tuple(target.shape)} are not classes for outputs of shape {tuple(output.shape)}: "
                "replace `correct`"
            )
        target = target.view_as(classes)
        return ((classes == target) * target_weights(target, weight)).sum()


def _first_values(unit: nn.Module) -> dict[str, Tensor]:
    """The first values of each parameter and buffer of a unit, by name, on the CPU."""
    return {
        name: tensor.detach().flatten()[:_COMPARED].cpu().clone()
        for name, tensor in (*unit.named_parameters(), *unit.named_buffers())
        if tensor.layout is torch.strided and not tensor.is_meta
    }


def _sum_of(values: Tensor) -> float:
    """The sum of all finite numbers."""
    numbers = torch.view_as_real(values) if values.is_complex() else values
    return numbers.double().nan_to_num(0, 0, 0).sum().item()


def fix_constants(units: Mapping[int, nn.Module], names: Collection[tuple[int, str]]) -> None:
    """Turn parameters of these units into buffers, which never train, in place.

    Args:
        units: units by index.
        names: (unit, name inside the unit) of each parameter.
    """
    for index, unit in units.items():
        for name, parameter in unit.named_parameters():
            if (index, name) in names:
                parameter.requires_grad_(False)
        _move_constants_to_buffers(unit)


def _move_constants_to_buffers(unit: nn.Module) -> None:
    for module in unit.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.detach())


def _check_tensors(unit: nn.Module, unit_name: str) -> None:
    for name, module in unit.named_modules():
        path = ".".join(filter(None, (unit_name, name)))
        for key, tensor in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
            if is_lazy(tensor):
                raise ValueError(
                    f"{path}.{key} has no shape before the first forward: give the module its input size, or run the "
                    "model on a sample in the function that builds it"
                )
            if isinstance(tensor, Tensor) and not tensor.is_leaf:
                raise ValueError(
                    f"{path}.{key} is computed from parameters outside of a forward, as by nn.utils.weight_norm or "
                    "prune: use a parametrization, such as nn.utils.parametrizations.weight_norm; after pruning call "
                    "prune.remove"
                )
            if isinstance(tensor, nn.Parameter) and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
                raise ValueError(
                    f"{path}.{key} has a hook, which would be lost, because every worker makes new parameters. To "
                    "mask a gradient, compute with weight * mask + weight.detach() * (1 - mask) in the forward"
                )


def target_weights(target: Tensor, weight: Tensor) -> Tensor:
    """The weight of each target: its sample's weight, or 0 for an ignored target."""
    of_samples = weight if target.dim() == 1 else weight.view(-1, *[1] * (target.dim() - 1))
    numbers = target if target.is_floating_point() else target.long()  # in uint8, 156 would equal -100
    return (numbers != NO_TARGET) * of_samples
