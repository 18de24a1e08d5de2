"""Drops lost workers: the survivors train on in the best layout that they carry, and replacements follow later.

Each turn compares the published members with the pods. A lost member is counted once, when its id is removed from the
wanted ones; `losses` says which losses are failures of the job. A joiner on a dead node, or on one that is being
emptied, is dropped like one that ended.
"""

from collections.abc import Mapping, Sequence

from pipetransformer_contract.api.status import (
    ConditionStatus,
    ConditionType,
    Reason,
    TooShort,
)
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from pipetransformer_operator.plan import budget, generations, layouts, workforce
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.losses import blames_device, describe, says_succeeded, words
from pipetransformer_operator.plan.members import parted
from pipetransformer_operator.plan.sharing.claim import is_in_vain
from pipetransformer_operator.plan.types import AVOIDED, FAILURES_ALLOWED, EventType
from pipetransformer_operator.plan.view import View

from . import start
from .incident import Incident
from .lost_steps import forget_generation
from .prepare import (
    back_off,
    begin,
    cancel,
    enter,
    go_on,
    is_late,
    sleep,
    try_at_once,
    why_not_ready,
)
from .stall import suspicion

_NO_REPLACEMENTS = "too few workers are left for any layout, and the next attempt to replace the others comes later"


def recover(draft: Draft) -> None:
    """Removes lost workers from the wanted ones, counts the incident, and publishes a generation of the survivors."""
    generation = draft.status.generation
    lost = find_lost(draft, generation) if generation else {}
    too_short, wanted = draft.status.too_short, draft.status.worker_ids
    counted = _drop(draft, lost)
    if draft.status.finished or not lost:
        return
    assert generation is not None
    survivors = draft.view.state_holders
    if generation.confirmed:  # before that, workers that surely hold state come first
        claimed, own = parted(survivors, draft.view.claimed_names)
        survivors = [*own, *claimed]
    if not survivors:
        forget_generation(draft)
        draft.update(resize=None, next_resize_time=None, leaving_ids=[], surplus_ids=[])
        draft.keep_workers(draft.view.joiners.ids, "no worker holds the job's state any longer")
        return
    candidates = [*survivors, *draft.view.ready_joiners]
    places = max(0, generation.layout.workers - len(candidates))  # those of lost members
    candidates += draft.view.idle_leavers[:places]
    if layout := layouts.best(draft.view, len(candidates)):
        back = ResizeReason.DRAIN if draft.status.too_short == too_short else ResizeReason.UNDO
        generations.publish(draft, layout, candidates, ResizeReason.FAILURE if counted else back)
    else:
        if draft.view.names_of(wanted) & lost.keys():
            try_at_once(draft)  # the wait was for another attempt, such as a claim
        _wait_for_replacements(draft, survivors)


def find_lost(draft: Draft, generation: Generation) -> dict[str, str]:
    """Names of the holders of state that can no longer train, and why."""
    holders = generation.members if generation.confirmed else [*generation.members, *generation.leavers]
    leavers = {member.name for member in generation.leavers}
    return {member.name: why for member in holders if (why := _why_lost(draft, member, leaves=member.name in leavers))}


def _why_lost(draft: Draft, member: Member, *, leaves: bool) -> str:
    """Why a member or leaver can no longer train; empty when it can, or left as told."""
    worker = draft.view.worker(member)
    if says_succeeded(worker):
        return ""
    if leaves and (draft.view.has_left(member) or (worker is not None and worker.exit_code == 0)):  # not yet confirmed
        return ""
    if not draft.view.alive(member):
        return describe(worker)
    if suspect := suspicion(draft.view, member):
        draft.suspects[member.name] = suspect
    return suspect


def _drop(draft: Draft, lost: Mapping[str, str]) -> bool:
    """Removes lost members and failed joiners from the wanted workers; all that fell at once are one incident.

    Returns whether it was a failure.
    """
    incident = Incident(draft.view, lost, draft.suspects)
    if not incident.why:
        return bool(lost)
    _note_too_short(draft, incident)
    _blame_nodes(draft, incident)
    _follow_up(draft, incident)
    draft.explained_ids = frozenset(incident.why)
    draft.keep_workers(draft.view.wanted_ids - incident.why.keys(), incident.why)
    _count(draft, incident)
    if incident.starting and not draft.status.finished:
        start.replace(draft, incident.described, incident.retry)
    return incident.counts


def _blame_nodes(draft: Draft, incident: Incident) -> None:
    """Notes nodes that refused workers, or whose accelerators failed. Says which nodes are avoided from now on."""
    gone = incident.observed
    broken = gone.that(blames_device)
    draft.unfit = frozenset([*gone.that(lambda worker: worker.rejected).nodes, *broken.nodes])
    draft.broken = {worker.uid: worker.node for worker in broken if worker.node}
    _tell_avoided(draft)


def _follow_up(draft: Draft, incident: Incident) -> None:
    """Cancels or renews what is prepared, and decides when the next attempt begins."""
    if draft.view.preparation and not incident.starting and not incident.members:
        if (key := incident.at_fault) is None:
            go_on(draft)
        else:
            cancel(draft, Reason.WORKER_FAILED, f"{incident.named(key)} ({incident.why[key]}) before it was ready")
    if any(key not in draft.view.claimed_ids for key in incident.members):
        try_at_once(draft)  # a replacement of its own worker is no claim
    elif incident.members and not incident.failed:
        back_off(draft)


def _count(draft: Draft, incident: Incident) -> None:
    """Counts the failure against the job's budget, and tells who is lost."""
    draft.failures += incident.failures
    if incident.counts:
        draft.tell(Reason.WORKER_LOST, f"Lost {incident.described}", EventType.WARNING)
        budget.note(draft, incident.silent, incident.described)
        if incident.counts_now:
            budget.count(draft, incident.described)
    elif incident.stranded or set(incident.members) - incident.short.keys():
        draft.tell(Reason.WORKER_DRAINED, f"Without {incident.described}")


def _tell_avoided(draft: Draft) -> None:
    """Tells which nodes are avoided from now on, because accelerators failed there more than once."""
    for node in dict.fromkeys(draft.broken.values()):
        failed = draft.observed.nodes.failures.get(node, 0) + list(draft.broken.values()).count(node)
        if failed > FAILURES_ALLOWED:
            until = f"no worker of any job is sent there before {draft.now + AVOIDED:%Y-%m-%dT%H:%M:%SZ}"
            draft.tell(Reason.NODE_AVOIDED, f"Node {node}: {failed} accelerators failed; {until}", EventType.WARNING)


def _note_too_short(draft: Draft, incident: Incident) -> None:
    """Notes that pipelines of lost members were packed into too little memory, so that longer ones follow."""
    if not incident.short:
        return
    most, boundary = max(incident.short.values()), draft.view.boundary
    one = incident.workers[min(incident.short)]
    draft.update(too_short=TooShort(stages=most, boundary=boundary))
    message = f"Pipelines of {most} stages need more memory than {one.name} has ({words(one)})"
    until = f"longer ones follow until more than {boundary} layers are frozen"
    draft.tell(Reason.OUT_OF_MEMORY, f"{message}; {until}", EventType.WARNING)


def _wait_for_replacements(draft: Draft, survivors: Sequence[Member]) -> None:
    """Wants replacements, because too few workers are left for any layout. The survivors hold their state meanwhile.

    The target is the best layout that is no larger than the present one, or the spec's if memory rules those out. It is
    smaller if an attempt for that one failed and nodes are known to have too little room for it. Past the deadline,
    with a durable checkpoint, all workers are given back and the job starts again from it. Without one the survivors
    keep the only copies, and new workers are tried later. The deadline counts from the first turn with too few workers,
    however often replacements end before they join. Leavers that wait for a checkpoint stay, because the job may have
    to start again in its old size.
    """
    generation, status = draft.status.generation, draft.status
    assert generation is not None
    kept = draft.view.ids_of(survivors)
    staying = [*kept, *status.leaving_ids]
    whole = layouts.best(draft.view, generation.layout.workers) or layouts.awaited(draft.view, generation.layout)
    to = _attainable(draft, whole)
    asleep = draft.view.sleeps() or is_in_vain(draft, to.workers)
    if asleep and status.checkpoint is None:
        draft.keep_workers(staying, _NO_REPLACEMENTS)
        return
    most = min(to.workers, draft.spec.elastic_policy.ceiling)  # workers above it would join nothing
    most = max(len(kept), most - len(draft.view.idle_leavers))
    if asleep:
        draft.keep_workers(staying, _NO_REPLACEMENTS)
    else:
        workforce.want(draft, [*kept, *draft.view.joining_ids][:most], most)
    begin(draft, ResizeReason.FAILURE)
    enter(draft, to, ResizeReason.FAILURE)
    if not is_late(draft):
        return
    reason, why = _why_not_replaced(draft.view)
    if status.checkpoint is None:
        cancel(draft, reason, f"too few workers are left, {why}")
        draft.keep_workers(staying, f"too few replacements joined in time, {why}")
        return
    try_at_once(draft)  # a start has other workers, and maybe other nodes
    wait = sleep(draft, reason)
    message = f"too few workers were left, all are to be given back: {why}; next start in {wait.total_seconds():.0f} s"
    draft.set_condition(ConditionType.RUNNING, False, reason, message)
    draft.tell(reason, message, EventType.WARNING)
    forget_generation(draft)
    draft.update(resize=None, leaving_ids=[])
    draft.keep_workers([], f"too few workers were left, {why}; the job starts again from its checkpoint")


def _attainable(draft: Draft, whole: Layout) -> Layout:
    """The layout to wait for: `whole`, or a smaller one that nodes have room for if they have none for `whole`."""
    prepared, reach = draft.view.preparation, draft.observed.reach
    if draft.view.joining_ids and prepared is not None and prepared.reason is ResizeReason.FAILURE:
        workers = min(prepared.to.layout.workers, whole.workers)  # what was chosen before its workers were wanted
    elif reach is not None and is_in_vain(draft, whole.workers):
        workers = draft.view.num_placed + reach
    else:
        return whole
    return layouts.best(draft.view, workers) or whole


def _why_not_replaced(view: View) -> tuple[Reason, str]:
    """What replacements wait for; between two attempts, what ended the last attempt."""
    last = view.status.condition(ConditionType.RESIZING)
    if view.asleep and last is not None and last.status is ConditionStatus.FALSE:
        return Reason(last.reason), "no replacement joined them, and Resizing says why"
    return why_not_ready(view)
