"""Publishes generations. A published generation is never changed, but the next one may return to the earlier layout."""

import hashlib
from collections.abc import Sequence
from datetime import timedelta

from pipetransformer_contract.api.status import Reason, ResizePhase
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Generation, Member, ResizeReason

from .draft import Draft
from .members import names, parted
from .view import View

#: Reasons of generations that cannot be undone, because there is no earlier layout to return to.
NOT_UNDONE = (ResizeReason.START, ResizeReason.FAILURE, ResizeReason.DRAIN, ResizeReason.UNDO)


def publish(
    draft: Draft, layout: Layout, candidates: Sequence[Member], reason: ResizeReason, broken_before: int = 0
) -> None:
    """Publishes the next generation. The first candidates become members; other candidates with state become leavers.

    Args:
        draft: draft of the job's plan.
        layout: layout of the next generation.
        candidates: possible members. Those that hold state come first, because the first member may become the leader.
            A holder of state that is not among the candidates takes no part.
        reason: why the layout changes.
        broken_before: how many generations in a row broke before this one.
    """
    number = draft.status.layout_generation + 1
    leavers, _ = parted(candidates[layout.workers :], names(draft.view.state_holders))
    generation = _generation(draft.view, layout, candidates[: layout.workers], leavers, reason, broken_before)
    _note_leavers(draft, generation)
    new = draft.status.next_worker_id
    timeout = timedelta(seconds=draft.spec.run_policy.resize_timeout_seconds)
    draft.enter(ResizePhase.COMMIT, layout, reason, None if reason in NOT_UNDONE else draft.now + timeout)
    draft.update(generation=generation, layout_generation=number, first_new_worker_id=new)
    leave = f"; workers that leave: {len(leavers)}" if leavers else ""
    draft.tell(Reason.GENERATION_PUBLISHED, f"Generation {number} ({reason.value}): {layout.words}{leave}")


def _generation(
    view: View,
    layout: Layout,
    members: Sequence[Member],
    leavers: Sequence[Member],
    reason: ResizeReason,
    broken_before: int,
) -> Generation:
    before, report = view.status.generation, view.status.last_report
    number = view.status.layout_generation + 1
    return Generation(
        job_uid=view.observed.uid,
        layout_generation=number,
        stages=layout.stages,
        pipelines=layout.pipelines,
        members=list(members),
        leavers=list(leavers),
        leader=before.leader if before and before.leader in names(members) else members[0].name,
        nonce=hashlib.sha256(f"{view.observed.uid}/{number}/{view.observed.nonce}".encode()).hexdigest()[:32],
        reason=reason,
        boundary=view.boundary,
        boundary_step=report.boundary_step if report else 0,
        confirmed_generation=before.confirmed_generation if before else 0,
        published_time=view.now,
        broken_before=broken_before,
    )


def _note_leavers(draft: Draft, generation: Generation) -> None:
    view = draft.view
    left, stays = set(view.ids_of(generation.leavers)), set(view.ids_of(generation.members))
    surplus = {*view.status.surplus_ids, *(left if view.leaves_surplus(generation.reason) else ())}
    draft.update(leaving_ids=sorted((view.leaving_ids | left) - stays), surplus_ids=sorted(surplus - stays))
