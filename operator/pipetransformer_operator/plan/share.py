"""A job's share of the cluster while others want some of it; `allocate` computes it, and only `onPack: Auto` obeys."""

from ..api.status import Reason
from .draft import Draft


def take(draft: Draft) -> None:
    """Notes a new share. More than the job has is there to be claimed, whatever attempts failed before."""
    share, before = draft.observed.share, draft.status.share
    if share == before:
        return
    draft.update(share=share)
    draft.tell(Reason.SHARE_CHANGED, "No other job wants workers" if share is None else f"Share: {share} workers")
    plan = draft.status.plan
    if share is not None and plan is not None and share > plan.layout.workers:
        draft.update(next_resize_time=None)
