"""Starting, and starting again: workers are created, and when all are warm a generation is published."""

from pipetransformer_contract.choose import Bounds, Layout, Packing, choose
from pipetransformer_contract.messages import Offer, ResizeReason

from .draft import Draft


def start(draft: Draft) -> None:
    """Creates the workers of the starting layout and publishes it once each of them is ready."""
    status, elastic = draft.status, draft.spec.elastic_policy
    if status.start_time is None:
        draft.update(start_time=draft.now, initial_workers=elastic.workers, num_shards=draft.spec.max_pipelines)
    layout = starting_layout(draft)
    ready = draft.ready_joiners
    if len(ready) >= layout.workers:
        draft.publish(layout, ready, ResizeReason.START)
        draft.keep_workers(
            worker.id for worker in draft.wanted if worker.name in {m.name for m in ready[: layout.workers]}
        )
        return
    alive = [worker.id for worker in draft.joiners]
    uncreated = [key for key in draft.status.worker_ids if key not in {worker.id for worker in draft.wanted}]
    draft.keep_workers(draft.top_up([*alive, *uncreated][: layout.workers], layout.workers))


def starting_layout(draft: Draft) -> Layout:
    """The spec's layout, or what the durable checkpoint needs: never the size of a plan that may be lost."""
    bounds, checkpoint = draft.bounds, draft.status.checkpoint
    if checkpoint is None:
        return bounds.initial
    initial = Layout(checkpoint.min_stages, bounds.initial.pipelines)
    packed = choose(
        [Offer(stages=checkpoint.min_stages, bytes_per_worker=0)],
        bounds.initial.workers,
        Bounds(
            initial=initial,
            min_workers=bounds.min_workers,
            max_workers=bounds.max_workers,
            min_pipelines=bounds.min_pipelines,
            max_pipelines=bounds.max_pipelines,
            bytes_budget=0,
        ),
        on_pack=draft.on_pack,
        packing=Packing.PAPER,
    )
    return packed or bounds.initial
