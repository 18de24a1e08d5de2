"""Computes the input of `allocate` for one job, from the same `Observed` as the job's plan."""

import json
from bisect import bisect_left
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple

from pipetransformer_contract.api.job import JobSpec, PipeTrainingJob
from pipetransformer_contract.api.status import ConditionType, Reason
from pipetransformer_contract.choose import OnPack, choices
from pipetransformer_contract.layout import Layout
from pipetransformer_operator.plan import layouts
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.rules import share
from pipetransformer_operator.plan.rules.claim import postpones_hopeless_attempt
from pipetransformer_operator.plan.types import Observed, Worker

from .allocate import CLAIMED_PRIORITY, Demand, Pool

#: Time that the scheduler needs. A worker that has no node after this waits until other jobs release workers.
PATIENCE = timedelta(seconds=10)
#: Layouts with more pipelines are not considered, because the trainer predicts no step time for them.
MAX_WIDTHS = 64
#: Reasons why an attempt failed although free nodes would not have helped it.
_OTHER_REASONS = frozenset(
    {
        Reason.IMAGE_PULL,
        Reason.NOT_READY,
        Reason.WORKER_FAILED,
        Reason.CREATION_REFUSED,
        Reason.DELETION_REFUSED,
        Reason.WAITING_FOR_QUOTA,
        Reason.QUOTA_LOST,
    }
)
#: Fields of the pod template that say on which nodes a worker may run, and with which devices.
_PLACEMENT = ("nodeSelector", "affinity", "tolerations", "schedulerName", "resourceClaims")


def may_demand(job: PipeTrainingJob) -> bool:
    """Whether `demand_of` may return a demand. Most jobs train and are not `Auto`, so they are skipped cheaply."""
    return job.status.generation is None or job.spec.elastic_policy.on_pack is OnPack.AUTO


def demand_of(spec: JobSpec, observed: Observed, now: datetime) -> Demand | None:
    """The job's demand. None if it takes no part in sharing: it is not `Auto`, and does not wait for nodes to start."""
    draft = Draft(spec, observed, now)
    if not share.takes_part(draft):
        return None
    return _starting(draft) if draft.status.generation is None else _training(draft)


def _starting(draft: Draft) -> Demand | None:
    layout = layouts.starting(draft.view)
    if layout is None or not share.has_quota(draft):
        return None
    outlook = _Outlook.of(draft)
    if outlook.cannot_grow:
        return None
    waiting = outlook.waiting or postpones_hopeless_attempt(draft, layout.workers)
    if not waiting and draft.view.on_pack is not OnPack.AUTO:
        return None
    return _demand(draft, outlook, speeds={}, needs=layout.workers, waiting=waiting)


def _training(draft: Draft) -> Demand | None:
    speeds = _speeds(draft) if draft.view.on_pack is OnPack.AUTO else {}
    if not speeds:
        return None
    outlook, held, needs = _Outlook.of(draft), draft.view.num_placed, min(speeds)
    if outlook.cannot_grow:
        speeds = {workers: speed for workers, speed in speeds.items() if workers <= max(held, needs)}
    wants_more = draft.observed.free is not None and max(speeds) > held
    return _demand(draft, outlook, speeds=speeds, needs=needs, waiting=outlook.waiting or wants_more)


class _Outlook(NamedTuple):
    """Whether the job could use workers that other jobs release.

    Attributes:
        sits_out: for a while no job makes room for this one, because it could not use such room before.
        asleep: the job waits before its next attempt, because the last one found too few nodes.
        waiting: the job is `asleep`, or some of its workers have no node.
        cannot_grow: more workers would not help the job now.
    """

    sits_out: bool
    asleep: bool
    waiting: bool
    cannot_grow: bool

    @classmethod
    def of(cls, draft: Draft) -> "_Outlook":
        if share.sits_out(draft):
            return cls(sits_out=True, asleep=False, waiting=False, cannot_grow=True)
        asleep = draft.view.asleep and not _awaits_replacement(draft)
        lacked_nodes = asleep and _lacked_workers(draft)
        cannot_grow = share.is_refused(draft) or (asleep and not lacked_nodes) or _cannot_take_joiners(draft)
        waiting = lacked_nodes or _lacks_nodes(draft)
        return cls(sits_out=False, asleep=lacked_nodes, waiting=waiting, cannot_grow=cannot_grow)


def _demand(draft: Draft, outlook: _Outlook, *, speeds: dict[int, float], needs: int, waiting: bool) -> Demand:
    status, observed = draft.status, draft.observed
    return Demand(
        key=f"{observed.namespace}/{observed.name}",
        pool=pool_of(draft.spec, observed.namespace),
        speeds=speeds,
        held=draft.view.num_placed,
        share=_last_share(draft, outlook),
        needs=needs,
        starting=status.generation is None,
        waiting=waiting,
        asleep=outlook.asleep,
        priority=draft.view.wanted.without(draft.view.claimed_ids).highest_priority(status.priority),
        weight=draft.spec.elastic_policy.weight,
        base=status.initial_workers,
        leaving=_leaving(draft),
        free=observed.free,
        claimed_priority=draft.view.claimed.highest_priority(CLAIMED_PRIORITY),
    )


def _last_share(draft: Draft, outlook: _Outlook) -> int | None:
    """The job's last share; None without one. While the job sits out, at most the number of workers that it holds."""
    last = draft.status.share
    if last is None:
        return None
    return min(last.workers, draft.view.num_placed) if outlook.sits_out else last.workers


def pool_of(spec: JobSpec, namespace: str) -> Pool:
    """The pool of the job: accelerator resource and placement of its workers. Only jobs of one pool share workers.

    If the spec names no accelerator, the pool depends on all resources that the containers request. With resource
    claims (DRA) it also depends on the namespace, because a claim belongs to one."""
    template = spec.pod_template.spec.model_extra or {}
    same: dict[str, object] = {field: template[field] for field in _PLACEMENT if template.get(field)}
    has_claims = "resourceClaims" in same
    if has_claims:
        same["namespace"] = namespace
    if has_claims or not spec.accelerator_resource:
        containers = spec.pod_template.spec.containers
        same["resources"] = [one.resources.model_dump(mode="json", exclude_defaults=True) for one in containers]
    return spec.accelerator_resource, json.dumps(same, sort_keys=True)


def _leaving(draft: Draft) -> int:
    """How many workers are leaving nodes that other jobs can use afterwards."""
    others = draft.view.workers.without(draft.view.wanted_ids - draft.view.leaving_ids)
    return len(others.that(_has_usable_node))


def _has_usable_node(worker: Worker) -> bool:
    is_usable = not (worker.draining or worker.node_lost)
    return worker.scheduled and worker.holds and is_usable


def _awaits_replacement(draft: Draft) -> bool:
    """Whether the job is starting, and waits before it replaces a worker that ended."""
    return draft.status.generation is None and draft.status.resize is not None


def _lacked_workers(draft: Draft) -> bool:
    """Whether the last attempt failed because it got too few workers."""
    status = draft.status
    reason = status.reason(ConditionType.RUNNING if status.generation is None else ConditionType.RESIZING)
    if status.not_committed is not None:
        return reason == Reason.UNSCHEDULABLE
    return reason not in _OTHER_REASONS


def _cannot_take_joiners(draft: Draft) -> bool:
    """Whether no worker can join now, because the published generation is not confirmed, or its leavers do not leave.

    Only after several unconfirmed generations, or after `resizeTimeoutSeconds`."""
    generation = draft.status.generation
    if generation is None:
        return False
    settled = generation.confirmed and not draft.status.leaving_ids
    timeout = timedelta(seconds=draft.spec.run_policy.resize_timeout_seconds)
    repeated = generation.layout_generation > generation.confirmed_generation + 1
    return not settled and (repeated or draft.now >= draft.view.published_time + timeout)


def _lacks_nodes(draft: Draft) -> bool:
    """Whether some joiners have had no node for a while, or have none although other jobs make room for them."""
    prepared = draft.view.preparation
    if prepared is None:
        return False
    held_up = bool(draft.observed.refusal) or draft.view.awaits_quota
    late = share.is_open(draft) or draft.now >= prepared.start_time + PATIENCE
    placed = len(draft.view.joiners.placed)
    return late and not held_up and len(draft.view.joining_ids) > placed


def _speeds(draft: Draft) -> dict[int, float]:
    """Steps per second by each number of workers with a valid layout.

    If step times are not measured, a speed is the number of workers. The result leaves out larger sizes whose gain does
    not cover the pause, because the job would not take them. Before the first offers it has only the present size.
    """
    present, offers = draft.view.generation.layout.workers, layouts.offered(draft.view)
    if not offers:
        return {present: 1.0}
    bounds = layouts.bounds_of(draft.view)
    bounds = replace(bounds, max_pipelines=min(bounds.max_pipelines, MAX_WIDTHS))
    found = choices(offers, bounds, on_pack=draft.view.on_pack, packing=draft.spec.pipeline.packing)
    seconds = {Layout(offer.stages, time.pipelines): time.seconds for offer in offers for time in offer.step_seconds}
    measured = all(seconds.get(layout, 0.0) > 0 for layout in found)
    speeds = {layout.workers: 1 / seconds[layout] if measured else float(layout.workers) for layout in found}
    larger = sorted(workers for workers in speeds if workers > present)
    first = bisect_left(larger, True, key=lambda workers: _grows_to(draft, workers) > present)
    return {workers: speed for workers, speed in speeds.items() if workers not in larger[:first]}


def _grows_to(draft: Draft, workers: int) -> int:
    best = layouts.best(draft.view, workers)
    assert best is not None
    return best.workers
