"""Chooses a layout `(stages, pipelines)` from the model's offers and the number of workers.

The operator calls `choose` in each turn of its loop. Without an operator the leader calls it for its fixed set of
workers. It is pure: the same arguments always give the same layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .layout import Layout
from .messages import Offer

#: With `Release`, a step of the smaller layout may take at most this factor of the step time that it is compared with.
RELEASE_TOLERANCE = 1.05
#: With `Paper`, a regroup counts as this many steps of the present layout. `Paper` ignores measured pauses, so that it
#: decides alike on all machines and in `pipetransformer plan`. Measured pauses were 0.2 to 10 steps long.
PAPER_PAUSE_STEPS = 10


class OnPack(StrEnum):
    """What to do with the workers that packing frees."""

    WIDEN = "Widen"  #: use them as more pipelines
    RELEASE = "Release"  #: release them to the cluster
    HOLD = "Hold"  #: keep them as idle spares
    AUTO = "Auto"  #: as Widen, unless the operator finds that another job gains more from them

    @property
    def widens(self) -> bool:
        """Whether free workers become more pipelines."""
        return self in (OnPack.WIDEN, OnPack.AUTO)


class ReleaseDownTo(StrEnum):
    """How slow a step may become when a job releases workers."""

    PRESENT_STEP = "PresentStep"  #: about as slow as the present step, which freezing has made faster
    STARTING_STEP = "StartingStep"  #: about as slow as a step at the job's start, before any layer froze


class Packing(StrEnum):
    """The rule that decides when pipelines get shorter."""

    PAPER = "Paper"  #: halve while the largest stage needs no more memory than at the start (PipeTransformer, Eq. 2)
    MEASURED = "Measured"  #: the layout with the least time to the job's end, by measured costs


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a layout.

    Attributes:
        initial: the job's first layout.
        min_workers: smallest number of workers.
        max_workers: largest number of workers.
        min_pipelines: smallest number of pipelines (R).
        max_pipelines: largest number of pipelines (R).
        bytes_budget: bytes of the largest stage in the first layout, which `Paper` does not exceed later.
        starting_step_seconds: step time of the first layout with no frozen layers. With
            `ReleaseDownTo.STARTING_STEP` a step may become as slow; None with `PRESENT_STEP`, or if unknown.
    """

    initial: Layout
    min_workers: int
    max_workers: int
    min_pipelines: int
    max_pipelines: int
    bytes_budget: int
    starting_step_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Present:
    """The layout that trains now. `choose` weighs the gain of another layout against it.

    Attributes:
        layout: layout of the present generation.
        step_seconds: step time with the present cut of the stages; None before it was measured.
        remaining_steps: steps until the job's end; None if unknown, which counts as no end.
    """

    layout: Layout
    step_seconds: float | None = None
    remaining_steps: int | None = None

    def share_of(self, pause_seconds: float) -> float:
        """A pause divided by the number of remaining steps, in seconds. 0 if the job has no known end."""
        if self.remaining_steps is None:
            return 0.0
        return pause_seconds / self.remaining_steps if self.remaining_steps else math.inf

    @property
    def ends(self) -> bool:
        """Whether at most one step remains. A change would then train no step, because members learn of a new
        generation in the vote that ends the next step."""
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
    """Choose the best legal layout with at most `workers` workers.

    `Paper` begins with the initial number of stages. It halves this number while the largest stage needs at most
    `bytes_budget` bytes (PipeTransformer, Algorithm 1 and Eq. 2). It returns to a longer pipeline only if that needs
    less memory. All frozen layers count in the first stage, so a freeze may take each length above the budget. If
    there are too few workers for one such pipeline, it takes the longest pipeline that they can form. A tightly packed
    job is better than a job that waits. If the bounds allow no pipeline that is so short, it takes the
    shortest one that they allow.

    `Measured` leaves the present layout only if the remaining steps gain more than the pause of the change costs.
    `Widen` and `Auto` compare seconds. `Release` and `Hold` compare worker-seconds. They consider only layouts whose
    steps are about as fast as the present step, or as the step `bounds.starting_step_seconds` if it is set. If layers
    thaw, the present layout may become slower than that. Then the cheapest layout that is fast enough replaces it. No
    other hysteresis is needed, because a layout that was worth leaving is never worth returning to. Before anything is
    measured, the present layout stays; without a present layout, this takes the longest pipeline.

    If at most one step remains, the present layout stays if it is still possible.

    Args:
        offers: what the model can do now, one for each possible number of stages.
        workers: number of workers that there are, or that there could be.
        bounds: limits from the job's spec.
        on_pack: whether free workers become more pipelines.
        packing: which of the two rules above decides.
        present: the layout that trains now; None if none does. `Measured` compares other layouts with it.

    Returns:
        The layout; None if no layout is legal.
    """
    by_stages = {offer.stages: offer for offer in offers}
    limit = min(workers, bounds.max_workers)
    if present is not None and present.ends and _possible(present.layout, by_stages, limit, bounds, on_pack):
        return present.layout
    if packing is Packing.PAPER:
        stages = _paper_stages(by_stages, bounds, present)
        shorter = [s for s in sorted(by_stages, reverse=True) if s <= stages] or [stages]
        return _widest([*shorter, *sorted(s for s in by_stages if s > stages)], limit, bounds, on_pack)
    return _cheapest(by_stages, limit, bounds, on_pack, present)


def choices(offers: Sequence[Offer], bounds: Bounds, *, on_pack: OnPack, packing: Packing) -> set[Layout]:
    """All layouts that `choose` returns for some number of workers, without a present layout.

    `on_pack` must widen. Then the best layout for N workers that uses only M of them is also the best for M to N
    workers. So one pass over the measured layouts covers all numbers of workers.
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


def next_layout(
    offers: Sequence[Offer], workers: int, bounds: Bounds, *, on_pack: OnPack, packing: Packing, present: Present
) -> Layout | None:
    """Choose the layout to which the workers regroup; None if they continue without a regroup.

    It is another layout, or the present layout if it pays to cut its stages again. The arguments are those of `choose`.
    The leader of a fixed set of workers and `pipetransformer plan` call this. The operator compares several numbers of
    workers, so it calls `choose` and `pays_to_recut` itself.
    """
    best = choose(offers, workers, bounds, on_pack=on_pack, packing=packing, present=present)
    return None if best == present.layout and not pays_to_recut(offers, present, packing) else best


def pays_to_recut(offers: Sequence[Offer], present: Present, packing: Packing) -> bool:
    """Whether the remaining steps gain more than the pause costs, if the stages of the present layout are cut again.

    With `Paper` the pause counts as `PAPER_PAUSE_STEPS` steps. Right after a cut the offered step time equals the
    present one, so this returns False.
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


def _paper_stages(by_stages: dict[int, Offer], bounds: Bounds, present: Present | None) -> int:
    stages = bounds.initial.stages
    while stages % 2 == 0:
        shorter = by_stages.get(stages // 2)
        if shorter is None or shorter.bytes_per_worker > bounds.bytes_budget:
            break
        stages //= 2
    short = stages if present is None else present.layout.stages
    if short in by_stages and stages in by_stages and stages % short == 0:
        needs_less = by_stages[stages].bytes_per_worker < by_stages[short].bytes_per_worker
        return stages if needs_less else short
    return stages


def _pipelines(stages: int, limit: int, bounds: Bounds, on_pack: OnPack) -> range:
    """Legal numbers of pipelines of `stages` stages, ascending. Unless `on_pack` widens, they do not exceed the initial
    number of pipelines or the smallest legal one, whichever is larger."""
    fewest = max(bounds.min_pipelines, -(-bounds.min_workers // stages))
    most = min(limit // stages, bounds.max_pipelines)
    if not on_pack.widens:
        most = min(most, max(bounds.initial.pipelines, fewest))
    return range(fewest, most + 1)


def _widest(candidates: Sequence[int], limit: int, bounds: Bounds, on_pack: OnPack) -> Layout | None:
    """The layout with the most pipelines. Its number of stages is the first of the `candidates` with a legal layout."""
    for stages in candidates:
        if widths := _pipelines(stages, limit, bounds, on_pack):
            return Layout(stages, widths[-1])
    return None


def _possible(layout: Layout, by_stages: dict[int, Offer], limit: int, bounds: Bounds, on_pack: OnPack) -> bool:
    """Whether a layout is legal and fits in the workers' memory. Numbers of stages that do not fit are not offered."""
    return layout.stages in by_stages and layout.pipelines in _pipelines(layout.stages, limit, bounds, on_pack)


def _measured(by_stages: dict[int, Offer], limit: int, bounds: Bounds, on_pack: OnPack) -> dict[Layout, float]:
    """Step time in seconds, by legal layout."""
    seconds: dict[Layout, float] = {}
    for stages, offer in by_stages.items():
        legal = _pipelines(stages, limit, bounds, on_pack)
        seconds |= {Layout(stages, t.pipelines): t.seconds for t in offer.step_seconds if t.pipelines in legal}
    return seconds


def _cheapest(
    by_stages: dict[int, Offer], limit: int, bounds: Bounds, on_pack: OnPack, present: Present | None
) -> Layout | None:
    """The layout whose remaining steps cost the least, including the pause divided among them.

    The cost is in seconds if `on_pack` widens, otherwise in worker-seconds.
    """
    if present and not _possible(present.layout, by_stages, limit, bounds, on_pack):
        present = None
    seconds = _measured(by_stages, limit, bounds, on_pack)
    if not seconds:
        return present.layout if present else _widest(sorted(by_stages, reverse=True), limit, bounds, on_pack)
    stay = None
    if present is not None:
        stay = seconds.get(present.layout) if present.step_seconds is None else present.step_seconds
    too_slow = False
    if not on_pack.widens:
        bar = RELEASE_TOLERANCE * _slowest(min(seconds.values()), stay, bounds)
        too_slow = stay is not None and stay > RELEASE_TOLERANCE * bar
        seconds = {layout: taken for layout, taken in seconds.items() if taken <= bar}

    def price(layout: Layout, taken: float) -> float:
        return taken if on_pack.widens else taken * layout.workers

    def price_of_change(layout: Layout) -> float:
        pause = 0.0 if present is None else present.share_of(by_stages[layout.stages].pause_seconds)
        return price(layout, seconds[layout]) + price(present.layout if present else layout, pause)

    best = min(seconds, key=lambda layout: (price_of_change(layout), layout.workers, layout.stages), default=None)
    if present is None or stay is None or (best and too_slow):
        return best
    return best if best and price_of_change(best) < price(present.layout, stay) else present.layout


def _slowest(quickest: float, present: float | None, bounds: Bounds) -> float:
    """The largest step time in seconds, without the tolerance, that a layout may have after a release.

    If `bounds` has the step time of the start, that is the limit, or the time of the quickest layout if that is longer.
    Otherwise it is the present step time. Without a present layout it is the time of the quickest layout.
    """
    if bounds.starting_step_seconds is not None:
        return max(quickest, bounds.starting_step_seconds)
    return quickest if present is None else present
