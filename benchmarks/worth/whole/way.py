"""One way to train the job: what freezes, which layouts it may take, and which parts of the product it uses."""

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from pipetransformer_contract.choose import OnPack, Packing
from pipetransformer_contract.spec import ScheduleName

#: Frozen layers after each epoch: a third of the layers left, and the last one trains on.
BOUNDARIES = (4, 7, 9, 10, 11)


class Freezing(Enum):
    """Which layers freeze, and when. Runs of one value have the same losses in all layouts."""

    NOTHING = "nothing"
    BY_THIRDS = "thirds"
    TOP_HALF_TRAINS = "top half trains"

    def moves(self, layers: int, steps_per_epoch: int) -> list[tuple[int, int]]:
        """(step, frozen layers from there on)."""
        match self:
            case Freezing.NOTHING:
                return []
            case Freezing.BY_THIRDS:
                return [(epoch * steps_per_epoch, boundary) for epoch, boundary in enumerate(BOUNDARIES, start=1)]
            case Freezing.TOP_HALF_TRAINS:
                return [(0, layers // 2)]

    def spec(self, layers: int, steps_per_epoch: int) -> dict[str, Any]:
        """`spec.freeze`."""
        if self is Freezing.NOTHING:
            return {"policy": "None"}
        points = [{"step": step, "boundary": frozen} for step, frozen in self.moves(layers, steps_per_epoch)]
        return {"policy": "Explicit", "boundaries": points}


class Shape(Enum):
    """Which layouts a run may take."""

    AS_CUT = auto()  #: its first one, whose stages are not cut again once layers have frozen
    KEPT = auto()  #: its first one, whose stages are cut again
    SHORTER = auto()  #: fewer stages, never more pipelines than at the start
    ELASTIC = auto()  #: all that fit

    @property
    def is_elastic(self) -> bool:
        """Whether the numbers of stages or pipelines may change."""
        return self in (Shape.SHORTER, Shape.ELASTIC)


@dataclass(frozen=True)
class Way:
    """A run through the product.

    Attributes:
        name: key in the result.
        about: what it is, in the table.
        freezing: what freezes.
        shape: its layouts.
        cache: whether outputs of frozen layers are cached.
        offload: whether frozen layers whose outputs are cached leave the device.
        fits: whether a device has memory for the whole model.
        packing: the rule for layouts.
        schedule: of the pipeline.
    """

    name: str
    about: str
    freezing: Freezing = Freezing.NOTHING
    shape: Shape = Shape.KEPT
    cache: bool = False
    offload: bool = False
    fits: bool = False
    packing: Packing = Packing.MEASURED
    schedule: ScheduleName = ScheduleName.ONE_FORWARD_ONE_BACKWARD

    @property
    def on_pack(self) -> OnPack:
        """What becomes of freed workers."""
        return OnPack.RELEASE if self.shape is Shape.SHORTER else OnPack.WIDEN


_THIRDS = Freezing.BY_THIRDS
STATIC = Way("static", "best static layout")
STATIC_AUTO = Way("static_auto", "best static layout, schedule: Auto", schedule=ScheduleName.AUTO)
RECUT_CACHE = Way("freeze_recut_cache", "static, freezing, stages cut again, cache", _THIRDS, cache=True)
ELASTIC = Way("elastic", "ours: AutoPipe, AutoDP, AutoCache", _THIRDS, Shape.ELASTIC, cache=True)
OFFLOAD = Way("offload", "ours, and frozen layers leave the device", _THIRDS, Shape.ELASTIC, cache=True, offload=True)
OFFLOAD_AUTO = replace(
    OFFLOAD, name="offload_auto", about=f"{OFFLOAD.about}, schedule: Auto", schedule=ScheduleName.AUTO
)
DDP_FREEZE_CACHE = Way("ddp_freeze_cache", "stages: 1, freezing, cache", _THIRDS, cache=True, fits=True)
#: All ways through the product, in the order of the table.
WAYS = (
    STATIC,
    Way("freeze", "static and freezing, stages as they were", _THIRDS, Shape.AS_CUT),
    Way("freeze_recut", "static and freezing, stages cut again", _THIRDS),
    RECUT_CACHE,
    Way("autopipe", "AutoPipe, freed GPUs are given back", _THIRDS, Shape.SHORTER),
    Way("autopipe_autodp", "AutoPipe, AutoDP", _THIRDS, Shape.ELASTIC),
    ELASTIC,
    OFFLOAD,
    Way("paper", "packing: Paper", _THIRDS, Shape.ELASTIC, cache=True, packing=Packing.PAPER),
    Way("top_half", "only the top half trains from the start", Freezing.TOP_HALF_TRAINS, Shape.ELASTIC, cache=True),
    STATIC_AUTO,
    OFFLOAD_AUTO,
    Way("ddp", "stages: 1, if a GPU held the model", fits=True),
    DDP_FREEZE_CACHE,
)
