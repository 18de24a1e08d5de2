"""Chooses a layout `(stages, pipelines)` from what the model can do and how many workers there are.

The operator calls it in every turn of its loop. Without an operator the leader calls it for its fixed set of workers.
It is pure and keeps no state, so the same arguments always give the same layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .layout import Layout
from .messages import Offer

#: A narrower layout may be this much slower than the step it is compared with before a release counts as a loss.
RELEASE_TOLERANCE = 1.05
#: Cost of a regroup with `Paper`, in steps of the present layout. `Paper` measures nothing, so that it decides the same
#: on all machines and in a plan. Measured pauses were 0.2 to 10 steps long.
PAPER_PAUSE_STEPS = 10


class OnPack(StrEnum):
    """What to do with the workers that packing frees."""

    WIDEN = "Widen"  #: use them as more pipelines
    RELEASE = "Release"  #: release them to the cluster
    HOLD = "Hold"  #: keep them, idle and warm
    AUTO = "Auto"  #: use them unless another job would gain more from them: the operator decides

    @property
    def widens(self) -> bool:
        """Whether all available workers become pipelines."""
        return self in (OnPack.WIDEN, OnPack.AUTO)


class ReleaseDownTo(StrEnum):
    """How slow a step may become when workers are released."""

    PRESENT_STEP = "PresentStep"  #: about as slow as the present step, which freezing has made faster
    STARTING_STEP = "StartingStep"  #: about as slow as a step at the job's start, before any layer froze


class Packing(StrEnum):
    """The rule that decides when pipelines get shorter."""

    PAPER = "Paper"  #: halve while the largest stage needs no more memory than at the start (PipeTransformer, Eq. 2)
    MEASURED = "Measured"  #: least measured time to the end


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a layout. `initial` is the job's first layout; its largest stage needed `bytes_budget` bytes.

    `starting_step_seconds` is a step of the first layout with no frozen layers, if `ReleaseDownTo.STARTING_STEP` holds.
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
    """The layout that trains now, which a change is weighed against.

    Attributes:
        layout: layout of the present generation.
        step_seconds: step time with the stages as they are cut now; None before it was measured.
        remaining_steps: steps until the job's end; None if unknown, which counts as no end.
    """

    layout: Layout
    step_seconds: float | None = None
    remaining_steps: int | None = None

    def share_of(self, pause_seconds: float) -> float:
        """Seconds of a pause for each remaining step."""
        if self.remaining_steps is None:
            return 0.0
        return pause_seconds / self.remaining_steps if self.remaining_steps else math.inf

    @property
    def ends(self) -> bool:
        """Whether no other layout would train a step, because members change layouts with the vote of the next step."""
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
    """The best legal layout on at most `workers` workers; None if no layout is legal.

    Args:
        offers: what the model can do now, one for each possible number of stages.
        workers: how many workers there are (or could be).
        bounds: limits from the job's spec.
        on_pack: whether freed workers become pipelines.
        packing: the paper's deterministic rule or measurements.
        present: what trains now; `Measured` needs it to weigh a change.

    `Paper` halves the number of stages from the initial one while the largest stage fits `bytes_budget`
    (PipeTransformer, Algorithm 1 and Eq. 2). If there are fewer workers than that needs, it takes the longest pipeline
    that they can form. A tightly packed job that trains is worth more than a job that waits.

    `Measured` leaves the present layout only if the remaining steps gain more than the pause of the change costs.
    `Widen` compares seconds. `Release` and `Hold` compare worker-seconds, among layouts about as fast as the present
    one, or about as fast as the start's if `bounds` has its step. If layers thaw and the present layout becomes slower
    than that, the cheapest layout that is fast enough replaces it. No other hysteresis is needed, because a layout that
    was worth leaving is never worth returning to. Before anything is measured, the present layout stays. Without a
    present layout it takes the longest pipeline.

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
    """All layouts that `choose` returns for any number of workers while nothing trains.

    `on_pack` must widen. Then the best layout of some workers is also the best of fewer workers, down to its own size.
    So one pass over the measured layouts covers all numbers of workers.
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
    """The layout to regroup to; None to train on without a regroup.

    It is another layout, or the present one if cutting its stages again pays. The arguments are those of `choose`. The
    leader of a fixed set of workers and `pipetransformer plan` call this. The operator has several numbers of workers
    to compare, so it calls `choose` and `pays_to_recut` itself.
    """
    best = choose(offers, workers, bounds, on_pack=on_pack, packing=packing, present=present)
    return None if best == present.layout and not pays_to_recut(offers, present, packing) else best


def pays_to_recut(offers: Sequence[Offer], present: Present, packing: Packing) -> bool:
    """Whether cutting the stages of the present layout again gains more in the remaining steps than the pause costs.

    For `Paper` the pause costs `PAPER_PAUSE_STEPS` steps. A layout that was just cut again promises no further gain.
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
    """Legal numbers of pipelines at `stages`, ascending. They are no larger than needed unless packing widens."""
    fewest = max(bounds.min_pipelines, -(-bounds.min_workers // stages))
    most = min(limit // stages, bounds.max_pipelines)
    if not on_pack.widens:
        most = min(most, max(bounds.initial.pipelines, fewest))
    return range(fewest, most + 1)


def _widest(candidates: Sequence[int], limit: int, bounds: Bounds, on_pack: OnPack) -> Layout | None:
    """The widest layout at the first candidate number of stages that the workers suffice for."""
    for stages in candidates:
        if widths := _pipelines(stages, limit, bounds, on_pack):
            return Layout(stages, widths[-1])
    return None


def _possible(layout: Layout, by_stages: dict[int, Offer], limit: int, bounds: Bounds, on_pack: OnPack) -> bool:
    """Whether a layout is legal and fits in the workers' memory. Only layouts that fit are offered."""
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
    """The layout with the cheapest remaining steps, including each step's share of the pause."""
    if present and not _possible(present.layout, by_stages, limit, bounds, on_pack):
        present = None
    seconds = _measured(by_stages, limit, bounds, on_pack)
    if not seconds:
        return present.layout if present else _widest(sorted(by_stages, reverse=True), limit, bounds, on_pack)
    stay = None
    if present is not None:
        stay = seconds.get(present.layout) if present.step_seconds is None else present.step_seconds
    leaves = False
    if not on_pack.widens:
        bar = RELEASE_TOLERANCE * _slowest(min(seconds.values()), stay, bounds)
        leaves = stay is not None and stay > RELEASE_TOLERANCE * bar
        seconds = {layout: taken for layout, taken in seconds.items() if taken <= bar}

    def price(layout: Layout, taken: float) -> float:
        return taken if on_pack.widens else taken * layout.workers

    def price_of_change(layout: Layout) -> float:
        pause = 0.0 if present is None else present.share_of(by_stages[layout.stages].pause_seconds)
        return price(layout, seconds[layout]) + price(present.layout if present else layout, pause)

    best = min(seconds, key=lambda layout: (price_of_change(layout), layout.workers, layout.stages), default=None)
    if present is None or stay is None or (best and leaves):
        return best
    return best if best and price_of_change(best) < price(present.layout, stay) else present.layout


def _slowest(quickest: float, present: float | None, bounds: Bounds) -> float:
    """The step time that a release may come down to: the start's, if the job says so and any layout is as fast."""
    if bounds.starting_step_seconds is not None:
        return max(quickest, bounds.starting_step_seconds)
    return quickest if present is None else present
