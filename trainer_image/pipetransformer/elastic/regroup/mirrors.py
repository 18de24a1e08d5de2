"""Mirrors: copies of each stage in the next worker's host memory, for layouts with a single pipeline.

All workers mirror the same step: each keeps a copy of its own stage, and sends one to the next worker. If a worker
dies, the other workers together still have all of that step, and they all return to it. A worker may die before its
copy has arrived. So the mirror before is kept until all workers have the new one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipetransformer.device_copies import HostCopies
from pipetransformer.models.off_device import is_off
from pipetransformer.state.codec import UnitCodec
from pipetransformer.state.control import Control
from pipetransformer.state.layout import StageLayout
from pipetransformer.state.worker_state import WorkerState

from .transfer import HOST, CopiesCargo, Parts, move_units
from .transfer_plan import Move, OtherState


@dataclass(frozen=True, slots=True)
class Mirror:
    """One worker's copies of one step: its own units, and the units of the worker before it.

    Attributes:
        step: number of committed steps.
        control: the control state after that step, by field name.
        units: packed units by index, in host memory.
    """

    step: int
    control: dict[str, Any]
    units: dict[int, Parts]


@dataclass(slots=True)
class Mirrors:
    """The mirrors of one worker, oldest first.

    Attributes:
        every_steps: steps between two mirrors; None for no mirrors.
        codec: packs units.
        shells: all units of the model, used for their shapes only.
        device: where training runs.
        kept: the mirrors that are still needed.
    """

    every_steps: int | None
    codec: UnitCodec
    shells: Sequence[nn.Module]
    device: torch.device
    kept: list[Mirror] = field(default_factory=list)

    def suit(self, codec: UnitCodec, shells: Sequence[nn.Module]) -> None:
        """Mirror units of another model from now on. Earlier mirrors stay as they are."""
        self.codec, self.shells = codec, shells

    def due(self, step: int, layout: StageLayout, first_step: int) -> bool:
        """Whether to mirror now: every `every_steps` steps, and after the first step of a layout, because its workers
        hold other stages than before. Layouts with several pipelines, or with one stage, have no mirrors.

        Args:
            step: number of committed steps.
            layout: the layout.
            first_step: number of committed steps when the layout began.
        """
        if self.every_steps is None or layout.pipelines > 1 or layout.stages == 1:
            return False
        return step % self.every_steps == 0 or step == first_step + 1

    def take(self, state: WorkerState, layout: StageLayout, world: dist.ProcessGroup) -> None:
        """Mirror the committed state. All members call this between rounds.

        Raises:
            RuntimeError: a connection broke. Earlier mirrors stay.
        """
        control = state.control.to_dict()
        host = HostCopies()
        own = {index: self._copied(state, index, host) for index in layout.units}
        host.wait()
        moves = []
        for rank in range(layout.stages):
            units = layout.cut.units_of(layout.roles[rank][1])
            moves += [Move(unit=unit, source=rank, target=(rank + 1) % layout.stages) for unit in units]
        cargo = CopiesCargo(own, self.codec, self.shells, state.control.boundary)
        received = move_units(moves, layout.rank, world, cargo)
        self.kept.append(Mirror(state.control.step, control, own | received))

    def _copied(self, state: WorkerState, index: int, host: HostCopies) -> Parts:
        """A unit's parts in host memory, complete after `host.wait()`. If the unit is off the device, its large tensors
        are shared and not copied."""
        if is_off(state.held[index]):
            return self.codec.give(state, index, HOST)
        return [host.copy(part) for part in self.codec.give(state, index, self.device)]

    def settle(self) -> None:
        """Drop all mirrors except the newest. Call this once all members have the newest."""
        del self.kept[:-1]

    def forget_after(self, step: int) -> None:
        """Drop mirrors of steps after `step`, because training has returned to `step`."""
        self.kept = [mirror for mirror in self.kept if mirror.step <= step]

    def describe(self) -> list[OtherState]:
        """List the mirrors for the inventory of a regroup."""
        return [OtherState(step=m.step, units=sorted(m.units), control=m.control) for m in self.kept]

    def at(self, point: tuple[int, int, int]) -> Mirror | None:
        """Return the mirror of the committed state `point` (`Control.point`); None without one."""
        return next((mirror for mirror in self.kept if Control.from_dict(mirror.control).point == point), None)
