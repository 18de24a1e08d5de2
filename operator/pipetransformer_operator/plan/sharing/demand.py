"""What `allocate` needs to know of one job, from the same look at the world that its plan is made from."""

import json
from bisect import bisect_left
from dataclasses import replace
from datetime import datetime, timedelta

from pipetransformer_contract.api.job import JobSpec, PipeTrainingJob
from pipetransformer_contract.api.status import ConditionType, Reason, ResizePhase
from pipetransformer_contract.choose import Layout, OnPack, choices
from pipetransformer_operator.plan import layouts
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.types import Observed

from . import share
from .allocate import CLAIMED_PRIORITY, Demand
from .claim import is_in_vain

#: A scheduler needs a moment; workers without a node for longer wait for others to give some up.
PATIENCE = timedelta(seconds=10)
#: Wider layouts are not looked at, as the trainer predicts none.
MAX_WIDTHS = 64
_NOT_FOR_WANT_OF_WORKERS = (
    Reason.IMAGE_PULL,
    Reason.NOT_READY,
    Reason.WORKER_FAILED,
    Reason.CREATION_REFUSED,
    Reason.DELETION_REFUSED,
    Reason.WAITING_FOR_QUOTA,
    Reason.QUOTA_LOST,
)
#: Of the pod template: what says which nodes a worker may run on, and with which devices.
_PLACEMENT = ("nodeSelector", "affinity", "tolerations", "schedulerName", "resourceClaims")


def may_demand(job: PipeTrainingJob) -> bool:
    """Whether `demand_of` may say anything of the job: most of a thousand train and are not Auto, and need no look."""
    return job.status.generation is None or job.spec.elastic_policy.on_pack is OnPack.AUTO


def demand_of(spec: JobSpec, observed: Observed, now: datetime) -> Demand | None:
    """What the job has and could use; None if it has no part in the sharing: it is neither Auto nor waits for nodes to
    start on."""
    draft = Draft(spec, observed, now)
    status = draft.status
    if not spec.managed or draft.view.stopped or status.finished or draft.view.spec_errors:
        return None
    starting = status.generation is None
    layout = layouts.starting(draft.view) if starting else None
    if starting and layout is None:
        return None
    if starting and observed.queue is not None and not any(one.admitted for one in status.quota_requests):
        return None
    sits_out = share.sits_out(draft)
    asleep = not sits_out and _is_asleep(draft)
    auto = draft.view.on_pack is OnPack.AUTO
    stays = sits_out or _is_refused(draft) or _sleeps_over_something_else(draft) or _cannot_take_joiners(draft)
    waiting = asleep or (not sits_out and _lacks_nodes(draft))
    waiting |= layout is not None and not sits_out and is_in_vain(draft, layout.workers)
    if not (auto or (starting and waiting)) or (starting and stays):
        return None
    held = draft.view.num_placed
    speeds = {} if starting else _speeds(draft)
    if not starting and not speeds:
        return None
    if stays:
        speeds = {workers: speed for workers, speed in speeds.items() if workers <= max(held, min(speeds))}
    claimed_ids = set(status.claimed_ids)
    own = [worker.priority for worker in draft.view.wanted if worker.id not in claimed_ids]
    claims = [worker.priority for worker in draft.view.wanted if worker.id in claimed_ids]
    waiting = waiting or (observed.free is not None and max(speeds, default=0) > held)
    return Demand(
        key=f"{observed.namespace}/{observed.name}",
        pool=pool_of(spec, observed.namespace),
        speeds=speeds,
        held=held,
        share=min(status.share.workers, held if sits_out else status.share.workers) if status.share else None,
        needs=layout.workers if layout else min(speeds),
        starting=starting,
        waiting=waiting,
        asleep=asleep,
        priority=max(own, default=status.priority),
        weight=spec.elastic_policy.weight,
        base=status.initial_workers,
        leaving=_leaving(draft),
        free=observed.free,
        claimed_priority=max(claims, default=CLAIMED_PRIORITY),
    )


def pool_of(spec: JobSpec, namespace: str) -> tuple[str, str]:
    """What workers run on: only what is the same for both can one job give up for another. Without an accelerator's
    name that is all that their containers ask for; claims for devices (DRA) are of one namespace."""
    template = spec.pod_template.spec.model_extra or {}
    same: dict[str, object] = {field: template[field] for field in _PLACEMENT if template.get(field)}
    if template.get("resourceClaims"):
        same["namespace"] = namespace
    if not spec.accelerator_resource or template.get("resourceClaims"):
        containers = spec.pod_template.spec.containers
        same["resources"] = [one.resources.model_dump(mode="json", exclude_defaults=True) for one in containers]
    return spec.accelerator_resource, json.dumps(same, sort_keys=True)


def _leaving(draft: Draft) -> int:
    """Workers on their way out whose nodes others may have then."""
    kept = {worker.id for worker in draft.view.wanted} - set(draft.status.leaving_ids)
    out = (worker for worker in draft.observed.workers if worker.id not in kept)
    return sum(worker.scheduled and worker.holds and not worker.draining and not worker.node_lost for worker in out)


def _is_asleep(draft: Draft) -> bool:
    """Whether an attempt is slept over for want of workers."""
    status = draft.status
    if not draft.view.asleep or (
        status.generation is None and status.resize is not None
    ):  # there one that ended is awaited
        return False
    condition = status.condition(ConditionType.RUNNING if status.generation is None else ConditionType.RESIZING)
    if status.not_committed is not None and (condition is None or condition.reason != Reason.UNSCHEDULABLE):
        return False
    return condition is None or condition.reason not in _NOT_FOR_WANT_OF_WORKERS


def _sleeps_over_something_else(draft: Draft) -> bool:
    """Whether an attempt is slept over that more workers would not have helped."""
    starts = draft.status.generation is None and draft.status.resize is not None
    return draft.view.asleep and not starts and not _is_asleep(draft)


def _is_refused(draft: Draft) -> bool:
    """Whether workers that are to join cannot even be created."""
    return bool(draft.observed.refusal) and len(draft.view.joiners) < len(draft.view.joining_ids)


def _cannot_take_joiners(draft: Draft) -> bool:
    """Whether the members do not get into their generation, or leavers not out of it, so that none can join."""
    generation = draft.status.generation
    if (
        generation is None
        or generation.published_time is None
        or (generation.confirmed and not draft.status.leaving_ids)
    ):
        return False
    timeout = timedelta(seconds=draft.spec.run_policy.resize_timeout_seconds)
    again = generation.layout_generation > generation.confirmed_generation + 1
    return again or draft.now >= generation.published_time + timeout


def _lacks_nodes(draft: Draft) -> bool:
    """Whether workers that may be created have no node for a while, or although others made room for them."""
    resize = draft.status.resize
    if resize is None or resize.phase is not ResizePhase.PREPARE or draft.observed.refusal or draft.view.awaits_quota:
        return False
    if not share.is_open(draft) and draft.now < resize.start_time + PATIENCE:
        return False
    return len(draft.view.joining_ids) > sum(worker.scheduled for worker in draft.view.joiners)


def _speeds(draft: Draft) -> dict[int, float]:
    """Steps a second by the number of workers, for each legal size; by the workers alone where it was not measured.

    Larger sizes for which the job would not leave its present layout, for the pause costs more, are left out. Before
    its first offers it has what it has.
    """
    generation, offers = draft.status.generation, layouts.offered(draft.view)
    assert generation is not None
    if not offers:
        return {generation.layout.workers: 1.0}
    bounds = layouts.bounds_of(draft.view)
    bounds = replace(bounds, max_pipelines=min(bounds.max_pipelines, MAX_WIDTHS))
    found = choices(offers, bounds, on_pack=draft.view.on_pack, packing=draft.spec.pipeline.packing)
    seconds = {Layout(offer.stages, time.pipelines): time.seconds for offer in offers for time in offer.step_seconds}
    measured = all(seconds.get(layout, 0.0) > 0 for layout in found)
    speeds = {layout.workers: 1 / seconds[layout] if measured else float(layout.workers) for layout in found}
    larger = sorted(workers for workers in speeds if workers > generation.layout.workers)
    pays = bisect_left(larger, True, key=lambda workers: _grows_to(draft, workers) > generation.layout.workers)
    return {workers: speed for workers, speed in speeds.items() if workers not in larger[:pays]}


def _grows_to(draft: Draft, workers: int) -> int:
    best = layouts.best(draft.view, workers)
    return best.workers if best else 0
