"""The operators between two levels, on one axis of one parameter or on a list of layers.

In the paper, a group matrix F (small x large, rows sum to 1) takes the mean of each group, and T copies an entry to all
members of its group, so that F T = 1. A weight W (outputs x inputs) becomes F W T going down and T W F going up. F and
T have few entries, so views, means and copies take their place here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipetransformer_contract.spec import Grouping


@dataclass(frozen=True, slots=True)
class Groups:
    """Which entries of a level become one in the next.

    Attributes:
        factor: members of a group.
        grouping: with a factor of 2 and 12 entries, `Halves` groups 0 and 6, `Adjacent` 0 and 1.
    """

    factor: int
    grouping: Grouping

    def members(self, group: int, count: int) -> list[int]:
        """The members of a group of `count` entries."""
        if self.grouping is Grouping.HALVES:
            return list(range(group, count, count // self.factor))
        return list(range(group * self.factor, (group + 1) * self.factor))

    def group(self, member: int, count: int) -> int:
        """The group that an entry of `count` belongs to."""
        return member % (count // self.factor) if self.grouping is Grouping.HALVES else member // self.factor


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a parameter that is narrower in the next level.

    Attributes:
        blocks: equal blocks, such as heads, that are grouped as a whole. They are counted in the larger level.
        reads: whether the axis is multiplied with an input. Otherwise its entries are an output, or are added to one.
        parts: independent axes that are stored side by side, such as query, key and value.
    """

    blocks: int
    reads: bool = False
    parts: int = 1

    def narrow(self, x: Tensor, dim: int, groups: Groups) -> Tensor:
        """F along `dim` of an output, or T of an input: the mean of each group, or its sum."""
        before, size, after = _around(x, dim)
        view = x.reshape(*before, self.parts, *self._grouped(groups, size // (self.parts * self.blocks)), *after)
        along = len(before) + (1 if groups.grouping is Grouping.HALVES else 2)
        merged = view.sum(along) if self.reads else view.mean(along)
        return merged.reshape(*before, size // groups.factor, *after)

    def widen(self, x: Tensor, dim: int, groups: Groups) -> Tensor:
        """T along `dim` of an output, or F of an input: copies for each group, or equal shares."""
        before, size, after = _around(x, dim)
        shape = self._grouped(groups, size * groups.factor // (self.parts * self.blocks))
        along = 0 if groups.grouping is Grouping.HALVES else 1
        single = [*shape[:along], 1, *shape[along + 1 :]]
        view = x.reshape(*before, self.parts, *single, *after).expand(*before, self.parts, *shape, *after)
        wide = view.reshape(*before, size * groups.factor, *after)
        return wide / groups.factor if self.reads else wide

    def _grouped(self, groups: Groups, block_size: int) -> list[int]:
        """The shape of one part, with an axis for the members of a group."""
        count = self.blocks // groups.factor
        members = [groups.factor, count] if groups.grouping is Grouping.HALVES else [count, groups.factor]
        return [*members, block_size]


#: The axes of a parameter, None for one that stays as it is. Empty for a parameter that stays as a whole.
Axes = Sequence[Axis | None]


def narrow(x: Tensor, axes: Axes, groups: Groups) -> Tensor:
    """A parameter of the next, narrower level."""
    for dim, axis in enumerate(axes):
        x = x if axis is None else axis.narrow(x, dim, groups)
    return x


def widen(x: Tensor, axes: Axes, groups: Groups) -> Tensor:
    """A parameter of the level above, which is wider."""
    for dim, axis in enumerate(axes):
        x = x if axis is None else axis.widen(x, dim, groups)
    return x


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The parameter of one layer in place of several, in a new tensor."""
    return torch.stack(list(tensors)).mean(dim=0)


def _around(x: Tensor, dim: int) -> tuple[list[int], int, list[int]]:
    return list(x.shape[:dim]), x.shape[dim], list(x.shape[dim + 1 :])
