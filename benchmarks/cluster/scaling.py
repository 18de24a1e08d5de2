"""How quick an elastic job is in each layout, by the trainer's own model of a step.

All models have twelve equal layers of which a GPU can train three, so a job starts in pipelines of four. Its global
batch grows with the GPUs that its user asks for. Links are free. The layers of a job that freezes do so by thirds of
what is left, as in `benchmarks.worth.ideal`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from benchmarks.worth.ideal import Device, ideal_of
from pipetransformer.partition import Cut, StepModel
from pipetransformer.partition.ideal import segments, with_cache_of
from pipetransformer.partition.offers import PredictedLayout, make_offers
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer

from .trace import Job

LAYERS = 12
#: Stages with which every elastic job starts.
STAGES = 4
LAYERS_PER_GPU = LAYERS // STAGES
#: Frozen layers after each of the first tenths of a job that freezes.
BOUNDARIES = (4, 7, 9, 10, 11)
_EPOCHS = 10
#: A job may use this many times the GPUs that its user asks for.
GROWTH = 2


class Frozen(NamedTuple):
    """How many layers are frozen, and of how many of them the cache has the outputs. As none thaws, these have left the
    GPU where they may."""

    boundary: int
    cached: int


NOTHING_FROZEN = Frozen(0, 0)


@dataclass(frozen=True, slots=True)
class Part:
    """Steps up to `end` in which the frozen layers stay the same."""

    end: int
    frozen: Frozen


@dataclass(frozen=True, eq=False)
class Scaling:
    """Step times of all elastic jobs whose users ask for the same number of GPUs.

    Attributes:
        gpus: GPUs that the user asks for.
        pause: seconds of a change of layout.
        offload: whether frozen layers leave the GPU once the cache has their outputs.
        slowness: how many times the declared times a step takes.
    """

    gpus: int
    pause: float
    offload: bool = False
    slowness: float = 1.0
    _models: dict[Frozen, StepModel] = field(default_factory=dict, init=False, repr=False)
    _cuts: dict[tuple[Frozen, Layout], Cut] = field(default_factory=dict, init=False, repr=False)
    _offers: dict[Frozen, Sequence[Offer]] = field(default_factory=dict, init=False, repr=False)
    _seconds: dict[tuple[Frozen, Frozen, Layout], float] = field(default_factory=dict, init=False, repr=False)

    @property
    def start(self) -> Layout:
        """The layout that the user asks for."""
        return Layout(STAGES, self.gpus // STAGES)

    @property
    def starting_seconds(self) -> float:
        """Seconds of a step at the start."""
        return self.seconds(NOTHING_FROZEN, self.start)

    def parts(self, job: Job) -> Sequence[Part]:
        """The job's steps. In the layout that its user asks for they take as long as its trace says."""
        steps = max(1, round(job.seconds / self.starting_seconds))
        if not job.freezes:
            return [Part(steps, NOTHING_FROZEN)]
        epoch = max(1, round(steps / _EPOCHS))
        moves = [(number * epoch, boundary) for number, boundary in enumerate(BOUNDARIES, start=1)]
        run = segments(moves, steps, epoch)
        return [Part(one.first_step + one.steps, Frozen(one.boundary, one.cached)) for one in run]

    def offers(self, frozen: Frozen) -> Sequence[Offer]:
        """What the leader would offer the operator."""
        if frozen not in self._offers:
            model = self._model(frozen)

            def predict(stages: int, pipelines: int) -> PredictedLayout:
                cut = self._cut(frozen, Layout(stages, pipelines))
                needed = model.bytes_per_worker(frozen.boundary, cut, pipelines)
                return PredictedLayout(needed, self.slowness * model.step_seconds(frozen.boundary, cut, pipelines))

            most = GROWTH * self.gpus
            self._offers[frozen] = make_offers(
                predict, initial_stages=STAGES, max_workers=most, max_pipelines=most, pause_seconds=self.pause
            )
        return self._offers[frozen]

    def seconds(self, frozen: Frozen, layout: Layout, cut_when: Frozen | None = None) -> float:
        """Seconds of a step in a layout whose stages were cut now, or when less was frozen.

        Raises:
            MemoryBoundError: the layout does not fit the GPUs.
        """
        key = (frozen, cut_when or frozen, layout)
        if key not in self._seconds:
            cut = self._cut(cut_when or frozen, layout)
            seconds = self._model(frozen).step_seconds(frozen.boundary, cut, layout.pipelines)
            self._seconds[key] = self.slowness * seconds
        return self._seconds[key]

    def _cut(self, frozen: Frozen, layout: Layout) -> Cut:
        key = (frozen, layout)
        if key not in self._cuts:
            model = self._model(frozen)
            self._cuts[key] = model.cut(frozen.boundary, layout.stages, layout.pipelines)
        return self._cuts[key]

    def _model(self, frozen: Frozen) -> StepModel:
        if frozen not in self._models:
            model = ideal_of(Device(self.gpus, LAYERS_PER_GPU), offloaded=self.offload).model
            self._models[frozen] = with_cache_of(model, *frozen, off=frozen.cached)
        return self._models[frozen]


@cache
def scaling(gpus: int, pause: float, *, offload: bool = False, slowness: float = 1.0) -> Scaling:
    """The step times of jobs of that size, which all simulations of a process share."""
    return Scaling(gpus, pause, offload, slowness)
