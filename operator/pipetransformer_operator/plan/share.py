"""A job's share while others want workers. `allocate` computes it where jobs compete, and only `onPack: Auto` obeys;
where jobs yield to pods of other owners, all obey.

A job above its share gives whole pipelines back and sleeps over its next claim. One below it claims at once, whatever
attempts failed before. Claims may go beyond it, at the pace of claims: that is how free workers are found.
"""

from pipetransformer_contract.choose import OnPack

from ..api.status import Reason
from .draft import Draft


def take(draft: Draft) -> None:
    """Notes a new share."""
    share, before = draft.observed.share, draft.status.share
    if share == before:
        return
    draft.update(share=share)
    if share is not None and share.yields:
        draft.tell(Reason.SHARE_CHANGED, f"Yields all but {share.workers} workers to pods of others that wait")
        return
    if draft.on_pack is not OnPack.AUTO or (share.workers if share else None) == (before.workers if before else None):
        return
    words = f"may have {share.workers} workers" if share else "may have what it gets"
    draft.tell(Reason.SHARE_CHANGED, f"The job {words}: " + ("others want some" if share else "none waits for workers"))
    plan = draft.status.plan
    if share is not None and plan is not None and share.workers > plan.layout.workers:
        draft.update(next_resize_time=None)
