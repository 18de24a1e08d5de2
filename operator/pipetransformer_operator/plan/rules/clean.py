"""The third phase of a resize: leavers are given back once a checkpoint that knows the layout's boundary is durable.

Until then they keep their accelerators, because a job that has to start again needs the size that it starts with.
Leavers on a cordoned node go at once, because no other pod can use what they hold. Some stay as spares, like other
joiners: all of them with `onPack: Hold`, otherwise those that a loss left over and the next layout needs again.
"""

from collections.abc import Set

from pipetransformer_contract.api.status import ResizePhase
from pipetransformer_contract.choose import OnPack
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.quota import quota
from pipetransformer_operator.plan.sharing.claim import target


def under_way(draft: Draft) -> bool:
    """Gives back leavers that may go. Returns whether some still wait for a checkpoint."""
    status, generation = draft.status, draft.status.generation
    assert generation is not None
    draining = draft.view.wanted.among(draft.view.leaving_ids).draining
    _release(draft, draining.ids, "its node is emptied, and it has left")
    if draft.status.leaving_ids and draft.spec.checkpoint and not generation.covered_by(status.checkpoint):
        if status.resize is not None:
            draft.update(resize=status.resize.model_copy(update={"phase": ResizePhase.CLEAN, "deadline": None}))
        return True
    spares = _spares(draft)
    gone = draft.view.leaving_ids - spares
    _release(draft, gone, "it has left, and the present layout needs fewer workers")
    draft.update(leaving_ids=[])
    if gone and status.next_resize_time and generation.published_time:  # other jobs can only now have what it gave up
        draft.update(next_resize_time=status.next_resize_time + (draft.now - generation.published_time))
    if status.resize is not None and status.resize.phase is not ResizePhase.PREPARE:
        draft.update(resize=None)
    return False


def _spares(draft: Draft) -> set[int]:
    generation, status = draft.status.generation, draft.status
    assert generation is not None
    may_stay = draft.view.leaving_ids.difference(status.surplus_ids, quota.lost_ids(status, draft.observed))
    living = set(draft.view.wanted.among(may_stay).alive.ids)
    if draft.view.on_pack is OnPack.HOLD:
        return living
    needed = max(0, target(draft).workers - len(generation.members))
    return set(sorted(living, key=lambda key: (key in status.claimed_ids, key))[:needed])


def _release(draft: Draft, ids: Set[int], why: str) -> None:
    status, generation = draft.status, draft.status.generation
    assert generation is not None
    if not ids:
        return
    draft.update(releasing_ids=sorted({*status.releasing_ids, *(set(status.surplus_ids) & ids)}))
    why = f"generation {generation.layout_generation} ({generation.reason.value}): {why}"
    draft.keep_workers(draft.view.wanted_ids - ids, why)
