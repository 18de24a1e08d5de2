"""Keys of cache entries. A key has a digest of everything that its entry depends on, so a stale entry never matches."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from pipetransformer.data import as_bytes


class Key(NamedTuple):
    """The key of an entry.

    Attributes:
        prefix: digest of the units that computed the entry, from the model's first on.
        split: name of the sample's split.
        sample: id of the sample.
        augmentation: number of the sample's variant, because augmentation changes its input.
    """

    prefix: bytes
    split: str
    sample: int
    augmentation: int


class UnitContent:
    """Everything that a unit's digest depends on: structure, mode, parameters and buffers.

    The thread that runs the unit must make it, because that thread may change the unit's mode and move its tensors.
    """

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit
        self._modes = bytes(module.training for module in unit.modules())
        self._tensors = [(name, tensor.detach()) for name, tensor in [*unit.named_parameters(), *unit.named_buffers()]]

    def digest(self) -> bytes:
        """Compute the digest. Any thread may call it."""
        digest = hashlib.sha256(_structure(self.unit).encode() + self._modes)
        for name, tensor in self._tensors:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(as_bytes(tensor.cpu()))
        return digest.digest()


def _structure(unit: nn.Module) -> str:
    """A text that describes the unit's modules. Containers of parameters are only named, because their description
    names the device."""
    containers = (nn.ParameterList, nn.ParameterDict)
    modules = [
        f"{name}: {type(module).__qualname__}({'' if isinstance(module, containers) else module.extra_repr()})"
        for name, module in unit.named_modules()
    ]
    return "\n".join(modules)


class PrefixDigests:
    """Digests of a model's prefixes. Each unit is hashed only once while it stays frozen."""

    def __init__(self, salt: bytes) -> None:
        """`salt` is a digest of what all entries of the job depend on: model, data and precision."""
        self._salt = salt
        self._units: WeakKeyDictionary[nn.Module, bytes] = WeakKeyDictionary()

    def keep_only(self, units: Sequence[nn.Module]) -> None:
        """Forget the digests of all units except these, because the others may train before they freeze again."""
        for unit in set(self._units) - set(units):
            del self._units[unit]

    def of(self, units: Sequence[UnitContent]) -> list[bytes]:
        """A digest for each prefix: the first unit, the first two units, and so on."""
        digests = []
        digest = self._salt
        for content in units:
            if content.unit not in self._units:
                self._units[content.unit] = content.digest()
            digest = hashlib.sha256(digest + self._units[content.unit]).digest()
            digests.append(digest)
        return digests
