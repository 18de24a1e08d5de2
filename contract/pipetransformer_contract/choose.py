"""The choice of a layout: given what the model can do and what there is, which `(stages, pipelines)`?

Pure and small: the operator calls it at every turn of its loop; where there is no operator the leader calls it over its
fixed world. It keeps no memory, so the answer to the same question is always the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .messages import Offer

#: A narrower layout may be this much slower than the present one before releasing its workers counts as a loss.
RELEASE_TOLERANCE = 1.05


class OnPack(StrEnum):
    """What to do with the workers that packing frees."""

    WIDEN = "Widen"  #: use them as more pipelines
    RELEASE = "Release"  #: give them back to the cluster
    HOLD = "Hold"  #: keep them, idle and warm


class Packing(StrEnum):
    """Who says that a shorter pipeline is good."""

    PAPER = "Paper"  #: halve while the largest stage needs no more memory than at the start (PipeTransformer, Eq. 2)
    MEASURED = "Measured"  #: the shortest predicted step


@dataclass(frozen=True, slots=True)
class Layout:
    """`stages` workers a pipeline (K) times `pipelines` (R)."""

    stages: int
    pipelines: int

    @property
    def workers(self) -> int:
        return self.stages * self.pipelines


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a layout. `initial` is the layout of the job's start; `bytes_budget` what its largest stage needed."""

    initial: Layout
    min_workers: int
    max_workers: int
    min_pipelines: int
    max_pipelines: int
    bytes_budget: int


def choose(
    offers: Sequence[Offer],
    workers: int,
    bounds: Bounds,
    *,
    on_pack: OnPack,
    packing: Packing,
    current: Layout | None = None,
) -> Layout | None:
    """The best legal layout on at most `workers` workers, or None when there is none.

    Args:
        offers: what the model can do now, one for each possible number of stages.
        workers: how many workers there are (or could be).
        bounds: limits from the job's spec.
        on_pack: whether freed workers become pipelines.
        packing: the paper's deterministic rule or measurements.
        current: the layout that trains now; with `Measured`, `Release` gives workers back only while a step stays about
            as quick as there.

    With `Paper` the number of stages is halved from the initial one while the largest stage fits `bytes_budget`
    (PipeTransformer, Algorithm 1 and Eq. 2); when fewer workers are left than that needs, the longest pipeline that
    they carry is taken, for a job that trains tightly packed is worth more than one that waits.
    """
    by_stages = {offer.stages: offer for offer in offers}
    limit = min(workers, bounds.max_workers)
    if packing is Packing.PAPER:
        stages = _paper_stages(by_stages, bounds)
        return _widest([s for s in sorted(by_stages, reverse=True) if s <= stages] or [stages], limit, bounds, on_pack)
    return _quickest(by_stages, limit, bounds, on_pack, current)


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
    if on_pack is not OnPack.WIDEN:
        most = min(most, max(bounds.initial.pipelines, fewest))
    return range(fewest, most + 1)


def _widest(candidates: Sequence[int], limit: int, bounds: Bounds, on_pack: OnPack) -> Layout | None:
    """The first number of stages, in the order given, that the workers carry at all, as wide as it may be."""
    for stages in candidates:
        if widths := _pipelines(stages, limit, bounds, on_pack):
            return Layout(stages, widths[-1])
    return None


def _quickest(
    by_stages: dict[int, Offer], limit: int, bounds: Bounds, on_pack: OnPack, current: Layout | None
) -> Layout | None:
    seconds: dict[Layout, float] = {}
    for stages, offer in by_stages.items():
        legal = _pipelines(stages, limit, bounds, on_pack)
        for time in offer.step_seconds:
            if time.pipelines in legal:
                seconds[Layout(stages, time.pipelines)] = time.seconds
    if not seconds:
        return None
    if on_pack is OnPack.WIDEN:
        return min(seconds, key=lambda layout: (seconds[layout], layout.workers, layout.stages))
    bar = seconds.get(current, min(seconds.values())) if current else min(seconds.values())
    quick = [layout for layout in seconds if seconds[layout] <= bar * RELEASE_TOLERANCE]
    return min(quick, key=lambda layout: (layout.workers, seconds[layout], layout.stages))
