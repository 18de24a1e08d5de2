"""The choice of a layout: given what the model can do and what there is, which `(stages, pipelines)`?

Pure and small: the operator calls it at every turn of its loop; where there is no operator the leader calls it over its
fixed world. It keeps no memory, so the answer to the same question is always the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .layout import Layout
from .messages import Offer

#: A narrower layout may be this much slower than the present one before releasing its workers counts as a loss.
RELEASE_TOLERANCE = 1.05
#: What a regroup costs by `Paper`, in steps of the present layout. It measures nothing, so that it decides alike on all
#: machines and in a plan; measured pauses were 0.2 to 10 steps long.
PAPER_PAUSE_STEPS = 10


class OnPack(StrEnum):
    """What to do with the workers that packing frees."""

    WIDEN = "Widen"  #: use them as more pipelines
    RELEASE = "Release"  #: give them back to the cluster
    HOLD = "Hold"  #: keep them, idle and warm
    AUTO = "Auto"  #: use them, unless another job would gain more by them: the operator says how many there are

    @property
    def widens(self) -> bool:
        """Whether all workers that there are become pipelines."""
        return self in (OnPack.WIDEN, OnPack.AUTO)


class Packing(StrEnum):
    """Who says that a shorter pipeline is good."""

    PAPER = "Paper"  #: halve while the largest stage needs no more memory than at the start (PipeTransformer, Eq. 2)
    MEASURED = "Measured"  #: the least time to the end, by what was measured


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a layout. `initial` is the layout of the job's start; `bytes_budget` what its largest stage needed."""

    initial: Layout
    min_workers: int
    max_workers: int
    min_pipelines: int
    max_pipelines: int
    bytes_budget: int


@dataclass(frozen=True, slots=True)
class Present:
    """What trains now, so that a change is weighed against going on.

    Attributes:
        layout: of the present generation.
        step_seconds: of a step, its stages cut as they are; None before it was measured.
        remaining_steps: until the job's end; None when unknown, as if there was no end.
    """

    layout: Layout
    step_seconds: float | None = None
    remaining_steps: int | None = None

    def share_of(self, pause_seconds: float) -> float:
        """What a pause costs each of the remaining steps, in seconds."""
        if self.remaining_steps is None:
            return 0.0
        return pause_seconds / self.remaining_steps if self.remaining_steps else math.inf

    @property
    def ends(self) -> bool:
        """Whether no other layout would train a step: members hear of it with the vote of the next one."""
        return self.remaining_steps is not None and self.remaining_steps <= 1


def choose(
    offers: Sequence[Offer],
    workers: int,
    bounds: Bounds,
    *,
    on_pack: OnPack,
    packing: Packing,
    present: Present | None = None,
) -> Layout | None:
    """The best legal layout on at most `workers` workers, or None when there is none.

    Args:
        offers: what the model can do now, one for each possible number of stages.
        workers: how many workers there are (or could be).
        bounds: limits from the job's spec.
        on_pack: whether freed workers become pipelines.
        packing: the paper's deterministic rule or measurements.
        present: what trains now; `Measured` needs it to weigh a change.

    With `Paper` the number of stages is halved from the initial one while the largest stage fits `bytes_budget`
    (PipeTransformer, Algorithm 1 and Eq. 2); when fewer workers are left than that needs, the longest pipeline that
    they carry is taken, for a job that trains tightly packed is worth more than one that waits.

    With `Measured` the present layout is left only where the remaining steps gain more than the pause of the change
    costs: `Widen` counts seconds, `Release` and `Hold` count worker-seconds among the layouts whose steps are about as
    quick as the present ones. That test is all the hysteresis there is: what was worth leaving is never worth going
    back to. As long as nothing has been measured the present layout stays, or the longest pipeline is taken.

    Before the last step a layout that is still possible stays, because no other one would train a step.
    """
    by_stages = {offer.stages: offer for offer in offers}
    limit = min(workers, bounds.max_workers)
    if present is not None and present.ends and _possible(present.layout, by_stages, limit, bounds, on_pack):
        return present.layout
    if packing is Packing.PAPER:
        stages = _paper_stages(by_stages, bounds)
        return _widest([s for s in sorted(by_stages, reverse=True) if s <= stages] or [stages], limit, bounds, on_pack)
    return _cheapest(by_stages, limit, bounds, on_pack, present)


def choices(offers: Sequence[Offer], bounds: Bounds, *, on_pack: OnPack, packing: Packing) -> set[Layout]:
    """What `choose` answers, for one number of workers or another, as long as nothing trains.

    `on_pack` must widen: then the best layout of some workers is that of fewer, too, as long as they carry it. So a
    pass over what was measured does for all numbers.
    """
    found, limit = set(), bounds.max_workers
    if packing is Packing.MEASURED:
        measured = _measured({offer.stages: offer for offer in offers}, limit, bounds, on_pack)
        quickest = math.inf
        for layout in sorted(measured, key=lambda layout: (layout.workers, measured[layout], layout.stages)):
            if measured[layout] < quickest:
                found.add(layout)
                quickest = measured[layout]
        limit = min((layout.workers - 1 for layout in measured), default=limit)
    while best := choose(offers, limit, bounds, on_pack=on_pack, packing=packing):
        found.add(best)
        limit = best.workers - 1
    return found


def change(
    offers: Sequence[Offer], workers: int, bounds: Bounds, *, on_pack: OnPack, packing: Packing, present: Present
) -> Layout | None:
    """The layout to regroup to: another one, or the present one where its stages are cut anew; None to train on.

    Args are those of `choose`. The leader of a fixed world and `pipetransformer plan` ask this; the operator, which has
    several numbers of workers to ask about, asks for both halves itself.
    """
    best = choose(offers, workers, bounds, on_pack=on_pack, packing=packing, present=present)
    return None if best == present.layout and not pays_to_recut(offers, present, packing) else best


def pays_to_recut(offers: Sequence[Offer], present: Present, packing: Packing) -> bool:
    """Whether the present layout, its stages cut anew, gains more in the remaining steps than the pause costs.

    `Paper` takes the pause for `PAPER_PAUSE_STEPS` steps. A layout that was cut anew promises no further gain.
    """
    if present.step_seconds is None or present.ends:
        return False

    def pause(offer: Offer) -> float:
        assert present.step_seconds is not None
        return PAPER_PAUSE_STEPS * present.step_seconds if packing is Packing.PAPER else offer.pause_seconds

    return any(
        time.seconds + present.share_of(pause(offer)) < present.step_seconds
        for offer in offers
        for time in offer.step_seconds
        if Layout(offer.stages, time.pipelines) == present.layout
    )


def _paper_stages(by_stages: dict[int, Offer], bounds: Bounds) -> int:
    stages = bounds.initial.stages
    while stages % 2 == 0:
        shorter = by_stages.get(stages // 2)
        if shorter is None or shorter.bytes_per_worker > bounds.bytes_budget:
            break
        stages //= 2
    return stages


def _pipelines(stages: int, limit: int, bounds: Bounds, on_pack: OnPack) -> range:
    """Legal widths at `stages`, ascending: within the bounds, and no wider than needed unless packing widens."""
    fewest = max(bounds.min_pipelines, -(-bounds.min_workers // stages))
    most = min(limit // stages, bounds.max_pipelines)
    if not on_pack.widens:
        most = min(most, max(bounds.initial.pipelines, fewest))
    return range(fewest, most + 1)


def _widest(candidates: Sequence[int], limit: int, bounds: Bounds, on_pack: OnPack) -> Layout | None:
    """The first number of stages, in the order given, that the workers carry at all, as wide as it may be."""
    for stages in candidates:
        if widths := _pipelines(stages, limit, bounds, on_pack):
            return Layout(stages, widths[-1])
    return None


def _possible(layout: Layout, by_stages: dict[int, Offer], limit: int, bounds: Bounds, on_pack: OnPack) -> bool:
    """Whether a layout is legal and, being offered, fits the workers' memory."""
    return layout.stages in by_stages and layout.pipelines in _pipelines(layout.stages, limit, bounds, on_pack)


def _measured(by_stages: dict[int, Offer], limit: int, bounds: Bounds, on_pack: OnPack) -> dict[Layout, float]:
    """Seconds of a step, by legal layout."""
    seconds: dict[Layout, float] = {}
    for stages, offer in by_stages.items():
        legal = _pipelines(stages, limit, bounds, on_pack)
        seconds |= {Layout(stages, t.pipelines): t.seconds for t in offer.step_seconds if t.pipelines in legal}
    return seconds


def _cheapest(
    by_stages: dict[int, Offer], limit: int, bounds: Bounds, on_pack: OnPack, present: Present | None
) -> Layout | None:
    """The layout with the cheapest remaining steps, what the pause costs each of them included."""
    if present and not _possible(present.layout, by_stages, limit, bounds, on_pack):
        present = None
    seconds = _measured(by_stages, limit, bounds, on_pack)
    if not seconds:
        return present.layout if present else _widest(sorted(by_stages, reverse=True), limit, bounds, on_pack)
    stay = None
    if present is not None:
        stay = seconds.get(present.layout) if present.step_seconds is None else present.step_seconds
    if not on_pack.widens:
        bar = RELEASE_TOLERANCE * (min(seconds.values()) if stay is None else stay)
        seconds = {layout: taken for layout, taken in seconds.items() if taken <= bar}

    def price(layout: Layout, taken: float) -> float:
        return taken if on_pack.widens else taken * layout.workers

    def price_of_change(layout: Layout) -> float:
        pause = 0.0 if present is None else present.share_of(by_stages[layout.stages].pause_seconds)
        return price(layout, seconds[layout]) + price(present.layout if present else layout, pause)

    best = min(seconds, key=lambda layout: (price_of_change(layout), layout.workers, layout.stages), default=None)
    if present is None or stay is None:
        return best
    return best if best and price_of_change(best) < price(present.layout, stay) else present.layout
