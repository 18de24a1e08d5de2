"""Which layouts a job may have: calls `choose` with the leader's offers and the limits of the job's spec and data."""

from dataclasses import replace
from itertools import product

from pipetransformer_contract.choose import Bounds, OnPack, Packing, Present, ReleaseDownTo, choose
from pipetransformer_contract.choose import pays_to_recut as cut_pays
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Offer

from .quota import balance
from .view import View


def bounds_of(view: View) -> Bounds:
    """Limits of a layout. It has at most `num_shards` pipelines, because the order of the data allows no more."""
    elastic, stages, status = view.spec.elastic_policy, view.spec.pipeline.stages, view.status
    report = status.last_report
    by_start = elastic.release_down_to is ReleaseDownTo.STARTING_STEP
    return Bounds(
        initial=Layout(stages, max(1, (status.initial_workers or elastic.workers) // stages)),
        min_workers=elastic.min_workers,
        max_workers=elastic.ceiling,
        min_pipelines=elastic.min_pipelines,
        max_pipelines=min(view.spec.max_pipelines, status.num_shards or view.spec.max_pipelines),
        bytes_budget=report.bytes_budget if report else 0,
        starting_step_seconds=report.starting_step_seconds if report and by_start else None,
    )


def best(view: View, workers: int) -> Layout | None:
    """The best layout on at most `workers` workers, by the offers in the leader's last report; None if none is valid.

    Without offers it has as many stages as the present layout."""
    offers, bounds = offered(view), bounds_of(view)
    if not offers:
        offers, bounds = _of_one_length(awaited(view, view.generation.layout).stages, bounds)
    packing = view.spec.pipeline.packing
    return choose(offers, workers, bounds, on_pack=view.on_pack, packing=packing, present=_present(view))


def offered(view: View) -> list[Offer]:
    """The leader's newest offers, except those of pipelines that have run out of GPU memory before."""
    return [offer for offer in view.offers if fits(view, offer.stages, view.boundary)]


def fits(view: View, stages: int, boundary: int) -> bool:
    """Whether pipelines of `stages` stages may fit GPU memory at this boundary, because none ran out of it before."""
    return view.status.too_short is None or not view.status.too_short.rules_out(stages, boundary)


def kept(view: View, workers: int) -> Layout | None:
    """The present layout; None if that many workers, the spec's ceiling or GPU memory do not allow it.

    It may be below the spec's minimum, because a user may raise the minimum while the job trains. Then a job that
    replaces a lost worker trains on, and grows once there is room."""
    present = view.generation.layout
    allowed = present.workers <= min(workers, view.spec.elastic_policy.ceiling)
    return present if allowed and fits(view, present.stages, view.boundary) else None


def awaited(view: View, present: Layout) -> Layout:
    """The layout that a job with lost workers waits for: the present one, or the spec's if memory is too small."""
    return present if fits(view, present.stages, view.boundary) else bounds_of(view).initial


def starting(view: View) -> Layout | None:
    """The layout of a start; None if the spec's limits allow none.

    It has as many stages as the durable checkpoint needs, otherwise as the spec says. It has as many pipelines as the
    spec's limits and the queue's quota allow."""
    bounds, own = bounds_of(view), balance.usable(view.status, view.observed, starting=True)
    most = min(bounds.initial.workers, own.granted) if own else bounds.initial.workers
    for stages, workers in product(starting_lengths(view), (most, bounds.initial.workers)):
        offers, of_this_length = _of_one_length(stages, bounds)
        found = choose(offers, workers, of_this_length, on_pack=view.on_pack, packing=Packing.PAPER)
        if found is not None:
            return found
    return None


def starting_lengths(view: View) -> list[int]:
    """Possible numbers of stages of a start, the best first."""
    checkpoint, stages = view.status.checkpoint, view.spec.pipeline.stages
    if checkpoint is None or not fits(view, checkpoint.min_stages, checkpoint.boundary):
        return [stages]
    return [checkpoint.min_stages, stages]


def limited(view: View, workers: int) -> int:
    """`workers`, or the job's share if that is smaller and was computed for the present generation.

    Only `onPack: Auto` obeys the share, but every job obeys one that makes room for pods of other owners."""
    share = view.status.share
    if share is None or share.layout_generation != view.status.layout_generation:
        return workers
    if not (share.for_others or view.on_pack is OnPack.AUTO):
        return workers
    return min(workers, share.workers)


def pays_to_recut(view: View) -> bool:
    """Whether the members gain more than a pause costs if they keep the layout, and cut its stages again."""
    return cut_pays(view.offers, _present(view), view.spec.pipeline.packing)


def _of_one_length(stages: int, bounds: Bounds) -> tuple[list[Offer], Bounds]:
    """Offers and bounds that allow only pipelines of that many stages, without measurements."""
    initial = Layout(stages, bounds.initial.pipelines)
    return [Offer(stages=stages, bytes_per_worker=0)], replace(bounds, initial=initial, bytes_budget=0)


def _present(view: View) -> Present:
    """The layout that trains now, with its step time once the leader of the published generation reported it."""
    present, report = view.generation.layout, view.present_report
    if report is None:
        return Present(present)
    return Present(present, report.step_seconds, report.remaining_steps)
