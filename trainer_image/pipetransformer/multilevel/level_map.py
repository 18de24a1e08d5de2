"""Makes the units of one level from those of the next larger or smaller level, in a regroup or when a level ends.

On the way to a smaller level, each group of layers becomes one layer, their mean, and parameters become narrower. On
the way to a larger level, layers and channels are copied. The copies are then interpolated with the weights that the
larger level had before, because equal copies would stay equal.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor, nn

from pipetransformer.errors import SpecError
from pipetransformer.models import PipelineModel, Ties
from pipetransformer.state.control import Control

from .axes import Family, Heads
from .operators import Axes, Groups, mean, narrow, widen


class EarlierWeights(Protocol):
    """Reads the weights that this run kept of a level when it went on to a smaller one."""

    def read(self, level: int, unit: int) -> dict[str, Tensor]:
        """Return the parameters and buffers of a unit of this level, by whole-model name, on the CPU. The caller may
        change them.

        Raises:
            StorageError: they cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class Levels:
    """Two neighbouring levels, and how the parameters of one become those of the other.

    Attributes:
        large: the model of the larger level; its units are on the meta device.
        small: the model of the smaller level; its units are on the meta device.
        depth: groups of layers that become one layer; with a factor of 1 both levels have the same layers.
        width: groups of heads and channels that become one; with a factor of 1 both levels have the same width.
        family: says which axes of parameters become narrower; None if the width stays.
        heads: attention heads of the larger level; None if the width stays.
    """

    large: PipelineModel
    small: PipelineModel
    depth: Groups
    width: Groups
    family: Family | None = None
    heads: Heads | None = None

    def axes(self, name: str) -> Axes:
        """How each axis of a parameter changes between the levels; empty if none does. `name` is that inside the unit.

        Raises:
            SpecError: the family does not know the parameter.
        """
        if self.family is None or self.heads is None:
            return ()
        letters = self.family.letters(name)
        if letters is None:
            raise SpecError(
                "spec.multiLevel.widthFactor", f"must be 1, because it is unknown how to narrow the parameter {name}"
            )
        return self.heads.axes(letters, self.width)

    def gain(self, name: str) -> int:
        """A parameter is multiplied by this factor on the way to the smaller level, and divided on the way back.

        It is more than 1 only for the final norm, if embedding and output layer share a table.
        """
        if self.family is None or self.heads is None or not self.heads.shared_table:
            return 1
        return self.width.factor if self.family.letters(name) == "n" else 1

    def members(self, unit: int) -> list[int]:
        """The units of the larger level that become the unit `unit` of the smaller level."""
        layers = self.large.num_layers
        if unit in (0, self.small.num_layers + 1):
            return [0 if unit == 0 else layers + 1]
        return [1 + member for member in self.depth.members(unit - 1, layers)]

    def group(self, unit: int) -> int:
        """The unit of the smaller level that the unit `unit` of the larger level is made from."""
        layers = self.large.num_layers
        if unit in (0, layers + 1):
            return 0 if unit == 0 else self.small.num_layers + 1
        return 1 + self.depth.group(unit - 1, layers)


@dataclass(slots=True)
class LevelMap:
    """The state map of a level change (`elastic.regroup.StateMap`): makes the next level's units from the present ones.

    Attributes:
        levels: the present and the next level.
        down: whether the smaller of the two is the next one.
        level: number of the next level.
        alpha: on the way to a larger level, the share of the smaller level's weights in the result. The rest is the
            larger level's earlier weights.
        earlier: reads these earlier weights; needed only if `alpha` is below 1 and the next level is larger.
    """

    levels: Levels
    down: bool
    level: int
    alpha: float = 1.0
    earlier: EarlierWeights | None = None
    _kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def _old(self) -> PipelineModel:
        return self.levels.large if self.down else self.levels.small

    @property
    def _new(self) -> PipelineModel:
        return self.levels.small if self.down else self.levels.large

    @property
    def num_layers(self) -> int:
        return self._new.num_layers

    @property
    def ties(self) -> Ties:
        return self._new.ties

    @property
    def takes_moments(self) -> bool:
        return False

    def sources(self, unit: int) -> Sequence[int]:
        return self.levels.members(unit) if self.down else [self.levels.group(unit)]

    def blank(self, unit: int) -> nn.Module:
        return copy.deepcopy(self._new.units[unit])

    def prepare(self, units: Collection[int]) -> None:
        if self.earlier is not None and not self.down and self.alpha < 1:
            self._kept = {unit: self.earlier.read(self.level, unit) for unit in units}

    def make(self, unit: int, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shell = self._new.units[unit]
        constants = {name for name, _ in shell.named_buffers(remove_duplicate=False)}
        prefixes = [self._old.unit_name(source) for source in self.sources(unit)]
        made = {}
        for name in shell.state_dict():
            full = f"{self._new.unit_name(unit)}.{name}"
            sources = [old[f"{prefix}.{name}"] for prefix in prefixes if f"{prefix}.{name}" in old]
            _check(sources, len(prefixes), full)
            if name not in constants:
                made[full] = self._parameter(unit, name, full, sources)
            elif unit in self._kept:
                made[full] = self._kept[unit].pop(full).to(sources[0])
            else:
                made[full] = sources[0].clone()
        return made

    def _parameter(self, unit: int, name: str, full: str, sources: Sequence[Tensor]) -> Tensor:
        levels, axes = self.levels, self.levels.axes(name)
        if self.down:
            # Each layer becomes narrower first, because fresh memory takes longer than the arithmetic.
            return mean([narrow(source, axes, levels.width) for source in sources]).mul_(levels.gain(name))
        grown = widen(sources[0] / levels.gain(name), axes, levels.width)
        if self.alpha == 1:
            return grown.clone()
        # In place, because fresh memory for the larger model takes longer than its arithmetic.
        return self._kept[unit].pop(full).to(grown).lerp_(grown, self.alpha)

    def control(self, old: Control) -> Control:
        """The control state at the start of the next visit: no layers are frozen, and nothing is kept that was measured
        or decided for the present level's model."""
        return replace(
            old,
            visit=old.visit + 1,
            visit_done=False,
            boundary=0,
            boundary_step=old.step,
            decided_step=old.step,
            best={},
            best_step=0,
            kept_step=0,
            evaluations_since_best=0,
            costs=None,
            slice_costs=None,
            last_vote=[],
            last_similarities=[],
        )


def _check(sources: Sequence[Tensor], wanted: int, name: str) -> None:
    """Check that all layers of a group have the parameter `name` in the same shape, so that it has a mean.

    Raises:
        SpecError: a layer of the group lacks the parameter, or has it in another shape.
    """
    if len(sources) < wanted or any(source.shape != sources[0].shape for source in sources):
        raise SpecError(
            "spec.multiLevel.depthFactor",
            f"must be 1, because layers differ: some lack {name}, or have it in another shape",
        )
