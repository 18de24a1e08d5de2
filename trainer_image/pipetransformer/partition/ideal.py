"""Predicts what a job could reach at best: the fastest legal layout and cut at each boundary, without pauses.

`StepModel` predicts the times and `choose()` takes the layouts, as for a job that trains. The module also predicts the
runs that a user would pick instead, and a lower bound that no layout can beat.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pipetransformer.freeze.boundary import first_trainable
from pipetransformer_contract.choose import Bounds, OnPack, Packing, choose
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer, StepTime

from .best_cut import BestCut, best_cut
from .memory import paper_bytes
from .step_model import StepModel


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive steps with the same numbers of frozen and of cached layers.

    Attributes:
        first_step: the first of the steps.
        steps: number of steps.
        boundary: number of frozen layers.
        cached: number of frozen layers whose outputs the cache has, for the samples that it can hold. In the epoch
            after layers froze it is smaller than `boundary`, because samples were last read before they froze.
        off: number of frozen layers that have left the device, if the cache can hold all samples. After a thaw the
            layers that are still frozen stay off, although the cache no longer has their outputs.
    """

    first_step: int
    steps: int
    boundary: int
    cached: int
    off: int


def segments(moves: Sequence[tuple[int, int]], total_steps: int, steps_per_epoch: int) -> list[Segment]:
    """Split a run into segments.

    Args:
        moves: (step, number of frozen layers from this step on), ascending.
        total_steps: steps of the run.
        steps_per_epoch: steps after which a sample is read again.
    """
    steps, boundaries = [step for step, _ in moves], [0, *(boundary for _, boundary in moves)]

    def boundary_at(step: int) -> int:
        return boundaries[bisect_right(steps, step)]

    falls = [step for step, (before, after) in zip(steps, pairwise(boundaries), strict=True) if after < before]
    changes = {0, *steps, *(step + steps_per_epoch for step in steps)}
    starts = sorted(step for step in changes if step < total_steps)
    found, off = list[Segment](), 0
    for start, end in zip(starts, [*starts[1:], total_steps], strict=True):
        boundary, epoch_ago = boundary_at(start), start - steps_per_epoch
        thawed = any(epoch_ago < fall <= start for fall in falls)  # a thaw empties the cache
        cached = 0 if thawed else boundary_at(epoch_ago)
        off = max(min(off, boundary), cached)
        found.append(Segment(start, end - start, boundary, cached, off))
    return found


def with_cache_of(model: StepModel, boundary: int, cached: int, off: int) -> StepModel:
    """The step model of a segment with these numbers of layers; `Segment` explains them."""
    frozen = [unit.forward for unit in model.costs.large[: first_trainable(boundary)]]
    computed = sum(frozen[first_trainable(cached) :])
    return replace(model, cold_share=computed / sum(frozen) if computed else 0.0, cached_layers=off)


@dataclass(frozen=True, slots=True)
class Part:
    """A segment of a run: the layout in it, the seconds of a step, and the number of GPUs that the job holds."""

    segment: Segment
    layout: Layout
    step_seconds: float
    gpus: int


@dataclass(frozen=True, slots=True)
class Course:
    """A whole run, predicted without pauses."""

    parts: Sequence[Part]

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(part.segment.steps * part.step_seconds for part in self.parts)

    @property
    def gpu_seconds(self) -> float:
        """Seconds times GPUs held, summed over all steps."""
        return sum(part.segment.steps * part.step_seconds * part.gpus for part in self.parts)

    @property
    def layouts(self) -> list[Layout]:
        """The layouts in order. A layout that stays is listed once."""
        found = [part.layout for part in self.parts]
        return [layout for number, layout in enumerate(found) if number == 0 or layout != found[number - 1]]


@dataclass(frozen=True)
class Ideal:
    """The best layouts of a job, and the runs that they make possible.

    Attributes:
        model: predicts steps, and limits the memory by measured bytes.
        bounds: limits of a layout. With `packing: Paper` they also limit the memory, by the paper's estimate.
        packing: the job's `packing`.
    """

    model: StepModel
    bounds: Bounds
    packing: Packing
    _found: dict[tuple[int, int, int], dict[Layout, BestCut]] = field(default_factory=dict, init=False, repr=False)

    def layouts(self, boundary: int, cached: int, off: int) -> dict[Layout, BestCut]:
        """The best cut of each layout that fits the memory, in a segment with these numbers of layers (`Segment`)."""
        key = (boundary, cached, off)
        if key not in self._found:
            model = with_cache_of(self.model, *key)
            found = {
                layout: best_cut(model, boundary, layout.stages, layout.pipelines) for layout in self._all(boundary)
            }
            self._found[key] = {layout: best for layout, best in found.items() if best is not None}
        return self._found[key]

    def _layouts_in(self, segment: Segment) -> dict[Layout, BestCut]:
        return self.layouts(segment.boundary, segment.cached, segment.off)

    def best(self, segment: Segment, bounds: Bounds | None = None, on_pack: OnPack = OnPack.WIDEN) -> Layout:
        """The layout that `choose()` takes of all that fit the memory: the fastest, or with `Release` the cheapest.

        Raises:
            ValueError: no layout fits the memory.
        """
        by_stages: dict[int, list[StepTime]] = {}
        for layout, found in self._layouts_in(segment).items():
            time = StepTime(pipelines=layout.pipelines, seconds=found.seconds)
            by_stages.setdefault(layout.stages, []).append(time)
        offers = [Offer(stages=stages, step_seconds=times, bytes_per_worker=0) for stages, times in by_stages.items()]
        limits = self.bounds if bounds is None else bounds
        found_layout = choose(offers, limits.max_workers, limits, on_pack=on_pack, packing=Packing.MEASURED)
        if found_layout is None:
            raise ValueError(f"no layout of at most {limits.max_workers} workers fits the memory")
        return found_layout

    def static(self) -> Layout:
        """The fastest layout with no frozen layers."""
        return self.best(_START)

    def unfrozen(self, total_steps: int) -> Course:
        """A run in the best static layout, where no layers freeze."""
        return self.kept(self.static(), [replace(_START, steps=total_steps)])

    def kept(self, layout: Layout, run: Sequence[Segment]) -> Course:
        """A run in one layout, whose stages are cut again whenever the boundary moves."""
        return self._course([(segment, layout) for segment in run])

    def elastic(self, run: Sequence[Segment]) -> Course:
        """A run that has the fastest layout in each segment."""
        return self._course([(segment, self.best(segment)) for segment in run])

    def released(self, run: Sequence[Segment]) -> Course:
        """A run with the fewest GPU-seconds in each segment. Steps stay about as fast as at the start, in the best
        static layout."""
        static = self.static()
        seconds = self._layouts_in(_START)[static].seconds
        any_width = replace(static, pipelines=self.bounds.max_pipelines)  # a job would keep at most its own
        bounds = replace(self.bounds, initial=any_width, starting_step_seconds=seconds)
        return self._course([(segment, self.best(segment, bounds, OnPack.RELEASE)) for segment in run])

    def work_seconds(self, run: Sequence[Segment]) -> float:
        """Seconds that no layout can beat: the work shared evenly by all workers, without idle time and messages."""
        return sum(segment.steps * self._work(segment) for segment in run)

    def exact(self) -> bool:
        """Whether `best_cut` completed its search in all layouts that were looked at so far."""
        return all(best.exact for found in self._found.values() for best in found.values())

    def _course(self, chosen: Sequence[tuple[Segment, Layout]]) -> Course:
        return Course(
            [
                Part(segment, layout, self._layouts_in(segment)[layout].seconds, layout.workers)
                for segment, layout in chosen
            ]
        )

    def _work(self, segment: Segment) -> float:
        model = with_cache_of(self.model, segment.boundary, segment.cached, segment.off)
        least = min(
            sum(model.step(segment.boundary, size, layout.pipelines).units.cached_seconds) / size
            for layout in self._all(segment.boundary)
            for size in model.sizes(layout.stages, layout.pipelines)
        )
        return least * model.global_batch / self.bounds.max_workers

    def _all(self, boundary: int) -> list[Layout]:
        """All layouts within the bounds. Whether they fit the measured bytes is not checked here."""
        bounds = self.bounds
        return [
            Layout(stages, pipelines)
            for stages in range(1, min(len(self.model.unit_bytes) - 2, bounds.max_workers) + 1)
            if self.packing is Packing.MEASURED
            or paper_bytes(self.model.unit_bytes, boundary, stages) <= bounds.bytes_budget
            for pipelines in range(1, min(bounds.max_workers // stages, bounds.max_pipelines) + 1)
        ]


_START = Segment(first_step=0, steps=1, boundary=0, cached=0, off=0)
