"""The operators between two levels: how one axis of a parameter, or the list of layers, becomes smaller or larger.

The entries of an axis are heads or channels, and those of the list are layers. A group of them becomes one. In the
paper, a matrix F (small x large) takes the mean of each group, and T copies each entry to all members of its group, so
F T = 1. A weight W (outputs x inputs) becomes F W T on the smaller level, and T W F on the larger one. Here views,
means and copies replace the matrices, which would be mostly zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pipetransformer_contract.spec import Grouping


@dataclass(frozen=True, slots=True)
class Groups:
    """Which entries (layers, heads or channels) of a level become one entry of the next smaller level.

    Attributes:
        factor: number of entries in a group.
        grouping: which entries are in a group. Of 12 entries with a factor of 2, `Halves` puts 0 and 6 into one group,
            and `Adjacent` puts 0 and 1 into one.
    """

    factor: int
    grouping: Grouping

    def members(self, group: int, count: int) -> list[int]:
        """The entries in group number `group`, if the larger level has `count` entries."""
        if self.grouping is Grouping.HALVES:
            return list(range(group, count, count // self.factor))
        return list(range(group * self.factor, (group + 1) * self.factor))

    def group(self, member: int, count: int) -> int:
        """The number of the group that entry `member` is in, if the larger level has `count` entries."""
        return member % (count // self.factor) if self.grouping is Grouping.HALVES else member // self.factor


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a parameter that is narrower on the smaller level.

    Attributes:
        blocks: number of equal blocks, such as heads, on the larger level. A block is merged with others as a whole.
            If the axis cannot be divided into so many, each entry is a block.
        reads: whether it is an input axis, which is multiplied with an input. Otherwise it is an output axis, or that
            of something added to an output.
        parts: number of independent axes that are stored side by side, such as 3 for query, key and value.
    """

    blocks: int
    reads: bool = False
    parts: int = 1

    def narrow(self, x: Tensor, dim: int, groups: Groups) -> Tensor:
        """Make dimension `dim` of `x` narrower: each group becomes its mean (F), or its sum on an input axis (T)."""
        before, size, after = _around(x, dim)
        view = x.reshape(*before, self.parts, *self._grouped(groups, size), *after)
        along = len(before) + (1 if groups.grouping is Grouping.HALVES else 2)
        merged = view.sum(along) if self.reads else view.mean(along)
        return merged.reshape(*before, size // groups.factor, *after)

    def widen(self, x: Tensor, dim: int, groups: Groups) -> Tensor:
        """Make dimension `dim` of `x` wider: each entry becomes copies of itself (T), or equal shares of itself on an
        input axis (F)."""
        x = x / groups.factor if self.reads else x  # before the copies, because fresh memory takes long
        before, size, after = _around(x, dim)
        shape = self._grouped(groups, size * groups.factor)
        along = 0 if groups.grouping is Grouping.HALVES else 1
        single = [*shape[:along], 1, *shape[along + 1 :]]
        view = x.reshape(*before, self.parts, *single, *after).expand(*before, self.parts, *shape, *after)
        return view.reshape(*before, size * groups.factor, *after)

    def _grouped(self, groups: Groups, size: int) -> list[int]:
        """The shape of one part of the wider axis of this size, with a dimension for the members of a group."""
        of_part = size // self.parts
        blocks = of_part if of_part % self.blocks else self.blocks
        count = blocks // groups.factor
        members = [groups.factor, count] if groups.grouping is Grouping.HALVES else [count, groups.factor]
        return [*members, of_part // blocks]


#: The axes of a parameter; None for an axis that keeps its size. Empty for a parameter that does not change at all.
Axes = Sequence[Axis | None]


def narrow(x: Tensor, axes: Axes, groups: Groups) -> Tensor:
    """Make a parameter of the smaller level from one of the larger level."""
    for dim, axis in enumerate(axes):
        x = x if axis is None else axis.narrow(x, dim, groups)
    return x


def widen(x: Tensor, axes: Axes, groups: Groups) -> Tensor:
    """Make a parameter of the larger level from one of the smaller level."""
    for dim, axis in enumerate(axes):
        x = x if axis is None else axis.widen(x, dim, groups)
    return x


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of a parameter over several layers, in a new tensor."""
    first, *others = tensors
    total = first.clone()
    for other in others:
        total += other
    return total.div_(len(tensors))


def _around(x: Tensor, dim: int) -> tuple[list[int], int, list[int]]:
    return list(x.shape[:dim]), x.shape[dim], list(x.shape[dim + 1 :])
