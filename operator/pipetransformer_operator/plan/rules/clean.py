"""The third phase of a resize: releases leavers once a checkpoint with the layout's boundary is durable.

Until then leavers keep their accelerators, because a restart from an older checkpoint would need the larger layout.
Leavers on a cordoned node go at once, because no other pod can use their accelerators. Some leavers stay as spares:
with `onPack: Hold` all of them, otherwise those that the next larger layout needs again after a failure or a drain.
"""

from collections.abc import Set

from pipetransformer_contract.api.status import ResizePhase
from pipetransformer_contract.choose import OnPack
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.quota import balance

from .claim import target


def advance(draft: Draft) -> bool:
    """Releases the leavers that may go. Returns whether this phase is not over, because some wait for a checkpoint."""
    status, generation = draft.status, draft.view.generation
    draining = draft.view.wanted.among(draft.view.leaving_ids).draining
    _release(draft, draining.ids, "and on a node that is being drained")
    if draft.status.leaving_ids and draft.spec.checkpoint and not generation.covered_by(status.checkpoint):
        assert status.resize is not None
        draft.update(resize=status.resize.model_copy(update={"phase": ResizePhase.CLEAN, "deadline": None}))
        return True
    spares = _spares(draft)
    gone = draft.view.leaving_ids - spares
    _release(draft, gone, "which needs fewer workers")
    draft.update(leaving_ids=[])
    if gone and status.next_resize_time:  # only now can other jobs use them
        draft.update(next_resize_time=status.next_resize_time + (draft.now - draft.view.published_time))
    return False


def _spares(draft: Draft) -> set[int]:
    generation, status = draft.view.generation, draft.status
    may_stay = draft.view.leaving_ids.difference(status.surplus_ids, balance.lost_ids(status, draft.observed))
    living = set(draft.view.wanted.among(may_stay).alive.ids)
    if draft.view.on_pack is OnPack.HOLD:
        return living
    needed = max(0, target(draft).workers - len(generation.members))
    return set(sorted(living, key=lambda key: (key in status.claimed_ids, key))[:needed])


def _release(draft: Draft, ids: Set[int], why: str) -> None:
    status, generation = draft.status, draft.view.generation
    draft.update(releasing_ids=sorted({*status.releasing_ids, *(set(status.surplus_ids) & ids)}))
    why = f"not part of generation {generation.layout_generation} ({generation.reason.value}), {why}"
    draft.keep_workers(draft.view.wanted_ids - ids, why)
