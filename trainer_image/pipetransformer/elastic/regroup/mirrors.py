"""Copies of a stage in a neighbour's host memory, for a layout in which no other pipeline holds it.

All workers of a layout with one pipeline mirror the same step: each keeps a copy of its own stage as it was and gives
one to the next worker. So when one dies, the others still hold that whole step between them, and all go back to it. A
mirror replaces the one before only once everybody has voted after it: until then both are kept, for a worker may have
died before its copy arrived.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from pipetransformer.device_copies import HostCopies
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState

from .transfer import Parts, move_units
from .transfer_plan import Mirrored, Move


@dataclass(frozen=True, slots=True)
class Mirror:
    """What this worker keeps of one step: its own units and its neighbour's.

    Attributes:
        control: the control state of that step, by field name.
        units: by index, in host memory.
    """

    step: int
    control: dict[str, Any]
    units: dict[int, Parts]


@dataclass(slots=True)
class Mirrors:
    """The mirrors of one worker, oldest first.

    Attributes:
        every_steps: how often to mirror; None for never.
        give: the parts of a unit of a state, as `UnitCodec.give`.
        blank: parts to receive a unit in, for a boundary, in host memory.
    """

    every_steps: int | None
    give: Callable[[WorkerState, int], Parts]
    blank: Callable[[int, int], Parts]
    kept: list[Mirror] = field(default_factory=list)

    def due(self, step: int, layout: StageLayout, first_step: int) -> bool:
        """Whether to mirror after `step` committed steps in a layout that began at `first_step`: regularly, and once
        for each new layout, whose workers hold other stages."""
        if self.every_steps is None or layout.pipelines > 1 or layout.stages == 1:
            return False
        return step % self.every_steps == 0 or step == first_step + 1

    def take(self, state: WorkerState, layout: StageLayout, world: dist.ProcessGroup) -> None:
        """Mirror the committed state. All members call this between rounds.

        Raises:
            RuntimeError: a connection broke; the mirrors before still stand.
        """
        control = state.control.to_dict()
        host = HostCopies()
        own = {index: [host.copy(part) for part in self.give(state, index)] for index in layout.span}
        host.wait()
        moves = []
        for rank in range(layout.stages):
            span = layout.spans[layout.roles[rank][1]]
            moves += [Move(unit=unit, source=rank, target=(rank + 1) % layout.stages) for unit in span]
        received = move_units(
            moves, layout.rank, world, own.__getitem__, lambda unit: self.blank(unit, state.control.boundary)
        )
        self.kept.append(Mirror(state.control.step, control, own | received))

    def settle(self) -> None:
        """Everybody has voted, so everybody has the newest mirror: drop those before."""
        del self.kept[:-1]

    def forget_after(self, step: int) -> None:
        """Training went back to `step`: what was mirrored later did not happen."""
        self.kept = [mirror for mirror in self.kept if mirror.step <= step]

    def describe(self) -> list[Mirrored]:
        """For the inventory of a regroup."""
        return [Mirrored(step=m.step, units=sorted(m.units), control=m.control) for m in self.kept]

    def at(self, point: tuple[int, int]) -> Mirror | None:
        """The mirror of that committed state, if this worker keeps one."""
        return next((mirror for mirror in self.kept if Control.from_dict(mirror.control).point == point), None)
