"""Reacts to lost workers: the survivors continue in the best layout that they can run, and replacements follow later.

Each turn compares the published members with the pods. A lost member is counted once, because its id is then removed
from the wanted workers. `losses` says which losses are failures of the job. A joiner on a dead or drained node is
replaced like a joiner that ended.
"""

from collections.abc import Sequence

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
from pipetransformer_operator.plan.types import AVOIDED, FAILURES_ALLOWED, EventType
from pipetransformer_operator.plan.view import View

from . import start
from .attempts import back_off, back_off_start, renew, try_at_once
from .claim import postpones_hopeless_attempt
from .incident import Incident
from .lost_steps import forget_generation
from .prepare import cancel, end_other_preparation, enter, is_late, is_recovery
from .readiness import why_not_ready
from .stall import suspicion

_NO_REPLACEMENTS = "too few workers are left to train, and the next attempt to replace the lost ones begins later"


def recover(draft: Draft) -> None:
    """Stops wanting lost workers, counts the failure if it is one, and publishes a generation of the survivors."""
    draft.keep_workers(draft.view.wanted_ids - draft.view.vanished_ids, "its pod is gone")
    generation = draft.status.generation
    lost = find_lost(draft, generation) if generation else {}
    before = draft.status
    incident = Incident(draft.view, lost, draft.suspects)
    if incident.why:
        _drop_lost(draft, incident)
    if draft.status.finished or not lost:
        return
    survivors = _survivors(draft.view)
    if not survivors:
        forget_generation(draft)
        draft.update(resize=None, next_resize_time=None, leaving_ids=[], surplus_ids=[])
        draft.keep_workers(draft.view.joiners.ids, "no worker is left that holds the job's state")
        return
    # Ready joiners and idle leavers take the places of lost members.
    candidates = [*survivors, *draft.view.ready_joiners]
    places = max(0, draft.view.generation.layout.workers - len(candidates))
    candidates += draft.view.idle_leavers[:places]
    if layout := layouts.best(draft.view, len(candidates)) or layouts.kept(draft.view, len(candidates)):
        # If nothing was lost in this turn, replacements join for members that were lost in an earlier one.
        is_failure = incident.counts or not incident.why
        uncounted_reason = ResizeReason.DRAIN if draft.status.too_short == before.too_short else ResizeReason.UNDO
        generations.publish(draft, layout, candidates, ResizeReason.FAILURE if is_failure else uncounted_reason)
    else:
        if draft.view.names_of(before.worker_ids) & lost.keys():
            try_at_once(draft)  # the present wait follows another attempt, such as a claim
        _wait_for_replacements(draft, survivors)


def _survivors(view: View) -> list[Member]:
    """Workers that hold state: claimed ones last, but before the generation is confirmed members first."""
    if not view.generation.confirmed:
        return view.state_holders
    claimed, own = parted(view.state_holders, view.claimed_names)
    return [*own, *claimed]


def find_lost(draft: Draft, generation: Generation) -> dict[str, str]:
    """Workers with state that can no longer train, and why, by their names."""
    holders = generation.members if generation.confirmed else [*generation.members, *generation.leavers]
    leavers = {member.name for member in generation.leavers}
    return {member.name: why for member in holders if (why := _why_lost(draft, member, leaves=member.name in leavers))}


def _why_lost(draft: Draft, member: Member, *, leaves: bool) -> str:
    """Why this worker can no longer train; empty if it can, has succeeded, or left as told.

    `leaves`: the worker is a leaver of the published generation."""
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


def _drop_lost(draft: Draft, incident: Incident) -> None:
    """Stops wanting lost members and lost joiners, and reacts to them. All losses of one turn are one incident."""
    _note_too_short(draft, incident)
    _blame_nodes(draft, incident)
    _follow_up(draft, incident)
    draft.explained_ids = frozenset(incident.why)
    draft.keep_workers(draft.view.wanted_ids - incident.why.keys(), incident.why)
    _count(draft, incident)
    if incident.starting and not draft.status.finished:
        start.replace(draft, incident.described, incident.retry)


def _blame_nodes(draft: Draft, incident: Incident) -> None:
    """Notes nodes that rejected workers, or whose accelerators failed. Tells which nodes are avoided from now on."""
    gone = incident.lost_workers
    failed = gone.that(blames_device)
    draft.unfit = frozenset([*gone.that(lambda worker: worker.rejected).nodes, *failed.nodes])
    draft.failed_devices = {worker.uid: worker.node for worker in failed if worker.node}
    _tell_avoided(draft)


def _follow_up(draft: Draft, incident: Incident) -> None:
    """Adapts the present preparation to the losses, and sets when the next attempt to resize begins.

    If a job that trains lost only joiners, the preparation is cancelled if one of them failed or was evicted. Otherwise
    its time restarts. If a member of the starting size is lost, the next attempt begins at once. If only claimed
    members are lost and none failed, it waits, because the cluster would probably remove new claims too.
    """
    if draft.view.prepared_resize and not incident.lost_member_ids:
        if (key := incident.at_fault) is None:
            renew(draft)
        else:
            cancel(
                draft,
                Reason.WORKER_FAILED,
                f"lost {incident.name_and_node(key)} ({incident.why[key]}) before it was ready",
            )
    if any(key not in draft.view.claimed_ids for key in incident.lost_member_ids):
        try_at_once(draft)  # to replace a worker of the starting size is no claim
    elif incident.lost_member_ids and not incident.failed_member_ids:
        back_off(draft)


def _count(draft: Draft, incident: Incident) -> None:
    """Counts the incident against the job's budget if it is a failure, and tells which workers are lost."""
    draft.failures += incident.failures
    if incident.counts:
        draft.tell(Reason.WORKER_LOST, f"Lost {incident.described}", EventType.WARNING)
        budget.note(draft, incident.silent, incident.described)
        if incident.counts_now:
            budget.count(draft, incident.described)
    elif incident.stranded or set(incident.lost_member_ids) - incident.out_of_memory.keys():
        draft.tell(Reason.WORKER_DRAINED, f"Continuing without {incident.described}")


def _tell_avoided(draft: Draft) -> None:
    """Tells which nodes new workers avoid from now on, because more than one accelerator failed there."""
    for node in dict.fromkeys(draft.failed_devices.values()):
        failed = draft.observed.nodes.failures.get(node, 0) + list(draft.failed_devices.values()).count(node)
        if failed > FAILURES_ALLOWED:
            until = f"no worker of any job is sent there before {draft.now + AVOIDED:%Y-%m-%dT%H:%M:%SZ}"
            draft.tell(Reason.NODE_AVOIDED, f"Node {node}: {failed} accelerators failed; {until}", EventType.WARNING)


def _note_too_short(draft: Draft, incident: Incident) -> None:
    """Notes with how many stages members ran out of memory after packing, so that the job uses longer pipelines."""
    if not incident.out_of_memory:
        return
    most, boundary = max(incident.out_of_memory.values()), draft.view.boundary
    one = incident.workers[min(incident.out_of_memory)]
    draft.update(too_short=TooShort(stages=most, boundary=boundary))
    message = f"Pipelines of {most} stages need more memory than {one.name} has ({words(one)})"
    until = f"the job uses longer ones until more than {boundary} layers are frozen"
    draft.tell(Reason.OUT_OF_MEMORY, f"{message}; {until}", EventType.WARNING)


def _wait_for_replacements(draft: Draft, survivors: Sequence[Member]) -> None:
    """Creates replacements, because too few workers are left for any layout. The survivors keep their state meanwhile.

    The target is the best layout that is no larger than the present one, or the spec's if those need too much memory. A
    smaller one follows if an attempt failed and nodes are known to have too little room. After the deadline a job with
    a durable checkpoint releases all workers, and starts again from the checkpoint. Without one the survivors hold the
    only copies, so they stay, and the operator tries again later. The deadline counts from the first turn with too few
    workers, even if replacements end before they join. Leavers that wait for a checkpoint stay, because the job may
    have to start again in its old size.
    """
    generation, status = draft.view.generation, draft.status
    kept = draft.view.ids_of(survivors)
    staying = [*kept, *status.leaving_ids]
    whole = layouts.best(draft.view, generation.layout.workers) or layouts.awaited(draft.view, generation.layout)
    to = _attainable(draft, whole)
    asleep = draft.view.asleep_and_wakes() or postpones_hopeless_attempt(draft, to.workers)
    if asleep and status.checkpoint is None:
        draft.keep_workers(staying, _NO_REPLACEMENTS)
        return
    most = min(to.workers, draft.spec.elastic_policy.ceiling)  # no layout uses workers above the ceiling
    most = max(len(kept), most - len(draft.view.idle_leavers))
    if asleep:
        draft.keep_workers(staying, _NO_REPLACEMENTS)
    else:
        workforce.want(draft, [*kept, *draft.view.joining_ids][:most], most)
    end_other_preparation(draft, ResizeReason.FAILURE)
    enter(draft, to, ResizeReason.FAILURE)
    if not is_late(draft):
        return
    reason, why = _why_not_replaced(draft.view)
    if status.checkpoint is None:
        cancel(draft, reason, f"too few workers are left to train, and replacements are not ready: {why}")
        draft.keep_workers(staying, f"too few replacements joined in time: {why}")
        return
    try_at_once(draft)  # the next start creates other workers, maybe on other nodes
    wait = back_off_start(draft, reason)
    message = f"too few workers were left to train, all are released: {why}; next start in {wait.total_seconds():.0f} s"
    draft.set_condition(ConditionType.RUNNING, False, reason, message)
    draft.tell(reason, message, EventType.WARNING)
    forget_generation(draft)
    draft.update(resize=None)
    draft.keep_workers([], f"too few workers were left to train ({why}); the job starts again from its checkpoint")


def _attainable(draft: Draft, whole: Layout) -> Layout:
    """The layout to wait for: `whole`, or a smaller one if an attempt failed and nodes have no room for `whole`."""
    prepared, reach = draft.view.preparation, draft.observed.reach
    if draft.view.joining_ids and is_recovery(draft.view):
        assert prepared is not None
        workers = min(prepared.to.layout.workers, whole.workers)  # keep the target that this attempt began with
    elif postpones_hopeless_attempt(draft, whole.workers):
        assert reach is not None
        workers = draft.view.num_placed + reach
    else:
        return whole
    return layouts.best(draft.view, workers) or whole


def _why_not_replaced(view: View) -> tuple[Reason, str]:
    """Why replacements are not ready; between two attempts, why the last attempt ended. Reason and words."""
    last = view.status.condition(ConditionType.RESIZING)
    if view.asleep and last is not None and last.status is ConditionStatus.FALSE:
        return Reason(last.reason), "no replacement joined, and the condition Resizing says why"
    return why_not_ready(view)
