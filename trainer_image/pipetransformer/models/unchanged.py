"""Refuses forwards that change a parameter or a buffer of their unit, or compute with parameters of others.

The number of forwards depends on the layout, so the result of such changes would too. In each round, the version
counters of tensors show most changes at little cost. A unit's first forward is watched more closely. A write through
`.data` does not change the version, and torch does not see a write by numpy or a user's kernel at all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from pipetransformer.data import byte_tensor
from pipetransformer.errors import SpecError

_OTHERWISE = "If it is not to train, call requires_grad_(False) on it, or compute with it under torch.no_grad()"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module keeps a tensor.

    Attributes:
        path: whole-model name of the tensor.
        tensors: the module's own dictionary of its parameters, or of its buffers, by name.
        name: the tensor's name in that dictionary.
        kind: `parameter` or `buffer`.
        lasts: whether the tensor is part of the unit's `state_dict`. A buffer that is not may be replaced, for example
            by a longer table.
    """

    path: str
    tensors: Mapping[str, Tensor | None]
    name: str
    kind: str
    lasts: bool

    def refuse(self) -> SpecError:
        words = f"{self.path} changes in each forward, and the number of forwards depends on the layout: "
        if self.kind == "buffer":
            return SpecError("spec.model", f"{words}remove it, or make it a constant")
        return SpecError(
            "spec.model",
            f"{words}do not change the parameter, but compute with a changed copy, as "
            "functional.linear(x, self.weight.clamp(-1, 1)) does",
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """Tensors as they were at their places before some forwards. It keeps their memory alive, so that no other tensor
    can get the same address.

    This runs twice in each round, so it fills one list after another. An object for each tensor takes three times as
    long.
    """

    places: Sequence[_Place]
    tensors: Sequence[Tensor]
    versions: Sequence[int]
    storages: Sequence[torch.UntypedStorage | None]

    @classmethod
    def at(cls, places: Iterable[_Place]) -> "_Seen":
        """The tensors that stand at these places now. A place may be empty."""
        found = [(place, tensor) for place in places if (tensor := place.tensors.get(place.name)) is not None]
        tensors = [tensor for _, tensor in found]
        return cls([place for place, _ in found], tensors, *_state_of(tensors))

    def check(self) -> None:
        """Check that the forwards changed none of them.

        Raises:
            SpecError: a version is another, or a tensor that lasts was replaced or has other memory.
        """
        versions, storages = _state_of(self.tensors)
        now = [place.tensors.get(place.name) for place in self.places]
        if versions == self.versions and all(map(is_, now, self.tensors)) and all(map(is_, storages, self.storages)):
            return
        for number, place in enumerate(self.places):
            old, new = self.storages[number], storages[number]
            moved = old is not None and new is not None and old._cdata != new._cdata
            replaced = now[number] is not self.tensors[number]
            if versions[number] != self.versions[number] or (place.lasts and (moved or replaced)):
                raise place.refuse()


def _state_of(tensors: Sequence[Tensor]) -> tuple[list[int], list[torch.UntypedStorage | None]]:
    """The version counters and the storages of tensors. A tensor with several storages, as a sparse one, has None."""
    return [tensor._version for tensor in tensors], [_storage(tensor) for tensor in tensors]


class Unchanged:
    """Compares the version counters of some units' parameters and buffers before and after forwards.

    Args:
        units: the units, by their names in the model.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._places = [place for name, unit in units.items() for place in _places(name, unit)]

    @contextmanager
    def over(self) -> Iterator[None]:
        """A context for the forwards and backwards of a round.

        Raises:
            SpecError: on exit, if one of them changed a parameter or a buffer.
        """
        seen = _Seen.at(self._places)
        yield
        seen.check()


@contextmanager
def watching(unit: nn.Module, name: str, *, exactly: bool) -> Iterator[None]:
    """A context that watches one forward of a unit more closely than `Unchanged`.

    Args:
        unit: the unit.
        name: the unit's name in its model.
        exactly: whether to compare all values too. That needs a copy of the unit, so use it only once a job.

    Raises:
        SpecError: on exit, if the forward wrote to a parameter or a buffer, or computed with a parameter that the unit
            does not hold.
    """
    seen = _Seen.at(_places(name, unit))
    copies = [tensor.detach().clone() for tensor in seen.tensors] if exactly else []
    with _Operations(seen) as operations:
        try:
            yield
        except Exception as error:
            if operations.foreign is not None:  # it may be on another device
                raise _refuse_foreign(name, operations.foreign) from error
            raise
    if operations.written is not None:
        raise operations.written.refuse()
    seen.check()
    for place, tensor, copy in zip(seen.places, seen.tensors, copies, strict=False):
        if not _same(copy, tensor):
            raise place.refuse()
    if operations.foreign is not None:
        raise _refuse_foreign(name, operations.foreign)


def _refuse_foreign(name: str, parameter: nn.Parameter) -> SpecError:
    """The error for a parameter that the unit `name` only refers to, in a list or in a function.

    The trainer copies units, so such a parameter would stay as it was when the unit was copied.
    """
    return SpecError(
        "spec.model",
        f"{name} computes with a parameter of shape {tuple(parameter.shape)} that it does not hold, so the parameter "
        "would never train: set it, or its module, as an attribute. Parameters that units share train together. "
        f"{_OTHERWISE}",
    )


def check_loss(loss: Tensor, before: Node | None) -> None:
    """Check that a loss depends on no parameter except through the model's output.

    The trainer trains the parameters of units only. A parameter of a frozen net, such as a teacher, is no fault if it
    gets no gradient.

    Args:
        loss: the loss.
        before: `grad_fn` of the output before the loss was computed, because the loss may change the output in place.

    Raises:
        SpecError: autograd would compute the gradient of a parameter that the loss itself used.
    """
    for parameter in _parameters_behind(loss.grad_fn, before):
        # A loss that changes a view in place makes a graph that no longer passes through `before`.
        if all(parameter is not other for other in _parameters_behind(before)):
            raise SpecError(
                "spec.model",
                f"the loss computes with a parameter of shape {tuple(parameter.shape)}, which would never train, "
                f"because no unit holds it: let the head compute with it, and return what the loss needs. {_OTHERWISE}",
            )


def _parameters_behind(node: Node | None, end: Node | None = None) -> Iterator[nn.Parameter]:
    """The parameters whose gradients a backward from `node` computes, without those behind `end`."""
    seen, found = {None, end}, [node]
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), nn.Parameter):
            yield variable
        found += [each for each, _ in node.next_functions]


def _places(unit_name: str, unit: nn.Module) -> Iterator[_Place]:
    for name, module in unit.named_modules():
        prefix = ".".join(filter(None, (unit_name, name)))
        for key in module._parameters:
            yield _Place(f"{prefix}.{key}", module._parameters, key, "parameter", lasts=True)
        for key in module._buffers:
            lasts = key not in module._non_persistent_buffers_set
            yield _Place(f"{prefix}.{key}", module._buffers, key, "buffer", lasts)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors have the same bits, so that NaN equals itself. True if they have no values to compare."""
    return one.is_meta or torch.equal(byte_tensor(one), byte_tensor(other))


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage; None if it has several, as a sparse tensor has."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the operations of a unit's forward.

    Attributes:
        written: the place of the first tensor of `seen` to whose memory an operation wrote, through any tensor; None if
            none did.
        foreign: the first parameter that an operation used, and whose gradient autograd would compute, although it is
            not among `seen`; None if there is none.
    """

    def __init__(self, seen: _Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: _Place | None = None
        self.foreign: nn.Parameter | None = None
        self._own = {id(tensor) for tensor in seen.tensors}
        self._held: dict[int, list[tuple[range, _Place]]] = {}
        for place, tensor, storage in zip(seen.places, seen.tensors, seen.storages, strict=True):
            if storage is not None:
                self._held.setdefault(storage._cdata, []).append((_extent(tensor), place))

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in (each for given in (*args, *kwargs.values()) for each in _each(given)):
            if self.foreign is None and _wants_gradient(tensor) and id(tensor) not in self._own:
                self.foreign = tensor
        if self.written is None and func._schema.is_mutable:
            for number, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._note(args[number] if number < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _note(self, written: Any) -> None:
        for tensor in _each(written):
            storage = _storage(tensor) if isinstance(tensor, Tensor) else None
            for held, place in self._held.get(storage._cdata, ()) if storage is not None else ():
                changed = _extent(tensor)
                if changed.start < held.stop and held.start < changed.stop:
                    self.written = self.written or place


def _wants_gradient(tensor: Any) -> bool:
    """Whether `tensor` is a parameter whose gradient autograd would compute now."""
    return torch.is_grad_enabled() and isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _each(given: Any) -> Sequence[Any]:
    """The tensors of an argument, which may be a list of tensors."""
    return given if isinstance(given, list | tuple) else (given,)


def _extent(tensor: Tensor) -> range:
    """The range of bytes that a tensor covers in its storage. Several small parameters may share one storage."""
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.dtype.itemsize
    return range(start * size, (start + last + 1) * size if tensor.numel() else start * size)
