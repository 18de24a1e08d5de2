"""The shape of every model that can be pipelined: embedding, blocks, head.

These `num_layers + 2` units are the grain of everything that is cut, moved, frozen or saved: unit 0 is the embedding,
units 1..L are the blocks, unit L+1 is the head.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from .ties import Ties

#: What `cross_entropy` ignores.
_NO_TARGET = -100


def unit_name(index: int, num_layers: int) -> str:
    """Prefix of a unit's parameters in the whole model: `embedding`, `blocks.3`, `head`.

    Raises:
        IndexError: there is no such unit.
    """
    if not 0 <= index <= num_layers + 1:
        raise IndexError(f"unit {index} of a model with {num_layers} blocks")
    if index == 0:
        return "embedding"
    return "head" if index == num_layers + 1 else f"blocks.{index - 1}"


@dataclass
class PipelineModel:
    """A model as a list of units, each a module from one tensor to one tensor.

    `activation` is the shape, without the batch, of what the embedding and every block give. Subclasses replace `loss`
    and `correct` where the model is no classifier; where targets are floating, and `correct` is not replaced, there is
    no accuracy. Units that a worker did not ask for live on the meta device: their state has names and shapes, but no
    memory. Parameters that units share are found when the model is made, and those that want no gradient become
    buffers: they never train, whatever the boundary.
    """

    embedding: nn.Module
    blocks: list[nn.Module]
    head: nn.Module
    activation: tuple[int, ...]
    ties: Ties = field(init=False)

    def __post_init__(self) -> None:
        for unit in self.units:
            _fix_constants(unit)
        self.ties = Ties.of(self.units)

    @property
    def num_layers(self) -> int:
        """Number of blocks (L)."""
        return len(self.blocks)

    @property
    def units(self) -> list[nn.Module]:
        """Embedding, blocks and head, in order."""
        return [self.embedding, *self.blocks, self.head]

    def with_units(self, units: Mapping[int, nn.Module]) -> "PipelineModel":
        """This model, with all else that a subclass keeps in it, but with some of its units replaced by others of the
        same shapes."""
        model = copy.copy(self)
        model.embedding, *model.blocks, model.head = [units.get(index, unit) for index, unit in enumerate(self.units)]
        for unit in model.units:
            _fix_constants(unit)
        return model

    def shell(self) -> "PipelineModel":
        """A copy on the meta device, but for buffers that are no part of a unit's state: a unit that moves brings its
        state only. This one stays as it is, for its modules may be somebody's who asks for them again.

        Raises:
            ValueError: a tensor cannot be copied, for it has no shape yet, or belongs to the forward.
        """
        memory: dict[int, Tensor] = {}
        for index, unit in enumerate(self.units):
            _check_tensors(unit, self.unit_name(index))
            for tensor in unit.state_dict(keep_vars=True).values():
                empty = torch.empty_like(tensor, device="meta")
                memory[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        return self.with_units({index: copy.deepcopy(unit, dict(memory)) for index, unit in enumerate(self.units)})

    def unit_name(self, index: int) -> str:
        """Prefix of a unit's parameters: a whole-model name is `blocks.3.` + the name inside the unit."""
        return unit_name(index, self.num_layers)

    def activation_shape(self, micro_batch: int, length: int | None = None) -> tuple[int, ...]:
        """Shape of what travels between stages for a micro-batch of that many samples, cut to `length` positions."""
        return (micro_batch, *(self.activation if length is None else (length, *self.activation[1:])))

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sum of the losses of all targets, and the sum of their weights: the caller divides once, by the
        global weight.

        Args:
            output: (micro-batch, ..., classes) logits.
            target: (micro-batch, ...) class indices, -100 for none.
            weight: (micro-batch,) 0 for padding.
        """
        losses = functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none")
        weights = target_weights(target, weight).flatten()
        return torch.dot(losses, weights.to(losses.dtype)), weights.sum()

    def correct(self, output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Summed weight of the targets that `output` gets right.

        Raises:
            ValueError: there is not one target for each output.
        """
        classes = output.argmax(dim=-1)
        if target.numel() != classes.numel():
            raise ValueError(
                f"targets {tuple(target.shape)} are no classes of {tuple(output.shape)}: replace `correct`"
            )
        target = target.view_as(classes)
        return ((classes == target) * target_weights(target, weight)).sum()


def _fix_constants(unit: nn.Module) -> None:
    for module in unit.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.detach())


def _check_tensors(unit: nn.Module, unit_name: str) -> None:
    for name, module in unit.named_modules():
        path = ".".join(filter(None, (unit_name, name)))
        for own, tensor in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
            if is_lazy(tensor):
                raise ValueError(
                    f"{path}.{own} has no shape before a first forward: say the layer's input size, or run the model "
                    "on a sample where it is made"
                )
            if isinstance(tensor, Tensor) and not tensor.is_leaf:
                raise ValueError(
                    f"{path}.{own} is computed from parameters, and not by a forward: of torch's weight_norm use that "
                    "in nn.utils.parametrizations"
                )


def target_weights(target: Tensor, weight: Tensor) -> Tensor:
    """The weight of each target: its sample's, or none where there is no target."""
    of_samples = weight if target.dim() == 1 else weight.view(-1, *[1] * (target.dim() - 1))
    return (target != _NO_TARGET) * of_samples
