"""A job's share while others want workers. `allocate` computes it where jobs compete, and only `onPack: Auto` obeys;
where jobs yield to pods of other owners, all obey.

A job above its share gives whole pipelines back and sleeps over its next claim. For a while nobody makes room for it,
so what it gave does not come straight back. One below its share tries at once, whatever attempts failed before. None
claims beyond it: what is being freed is for those below theirs. Once all have what they should, none has a share, and
claims go on at their pace.

What others gave up may be of no use to it: no node is of its kind, or somebody else was quicker. Then nobody makes room
for it for a while, twice as long each time, and it tries by itself as if it were alone.
"""

from datetime import timedelta

from pipetransformer_contract.api.status import Reason
from pipetransformer_contract.choose import OnPack
from pipetransformer_operator.plan.draft import Draft

#: After workers found no node for which others had made room, until others make room again; doubled each time in a row.
FIRST_SIT_OUT = timedelta(minutes=10)
LONGEST_SIT_OUT = timedelta(days=1)
#: After a job gave workers up, until others make room for it.
REST = timedelta(minutes=10)


def take(draft: Draft) -> None:
    """Notes a new share."""
    share, before = draft.observed.share, draft.status.share
    if share == before:
        return
    draft.update(share=share)
    if share is not None and share.yields:
        draft.tell(Reason.SHARE_CHANGED, f"Yields all but {share.workers} workers to pods of others that wait")
        return
    if (share.workers if share else None) == (before.workers if before else None):
        return
    generation = draft.status.generation
    if share is not None and share.workers > (generation.layout.workers if generation else 0):
        draft.update(next_resize_time=None)
    granted = before.workers if before and not before.yields else 0
    if share is not None and share.workers > granted and is_open(draft):
        draft.prepare_anew(draft.now)  # from now on others make room
    if draft.view.on_pack is OnPack.AUTO:
        words = f"may have {share.workers} workers" if share else "may have what it gets"
        why = "others want some" if share else "no room is made for anybody"
        draft.tell(Reason.SHARE_CHANGED, f"The job {words}: {why}")


def ceiling(draft: Draft) -> int:
    """Workers up to which the job may grow, even if its share was computed for the layout before."""
    most, share = draft.spec.elastic_policy.ceiling, draft.status.share
    if share is None or share.yields or draft.view.on_pack is not OnPack.AUTO:
        return most
    return min(most, share.workers)


def is_open(draft: Draft) -> bool:
    """Whether the job has fewer workers with a node than it was granted."""
    share = draft.status.share
    return share is not None and not share.yields and draft.view.num_placed < share.workers


def note_vain(draft: Draft) -> None:
    """Notes, where others made room for the job, that it found no nodes all the same."""
    if not is_open(draft) and draft.observed.preferred_since is None:
        return
    times = draft.status.grants_in_vain
    wait = min(LONGEST_SIT_OUT, FIRST_SIT_OUT * (1 << min(times, 16)))
    draft.update(grants_in_vain=times + 1, next_grant_time=draft.now + wait)


def rest(draft: Draft) -> None:
    """Notes that the job gave workers up for another."""
    before, until = draft.status.next_grant_time, draft.now + REST
    draft.update(next_grant_time=until if before is None else max(before, until))


def sits_out(draft: Draft) -> bool:
    """Whether nobody makes room for the job."""
    return draft.status.next_grant_time is not None and draft.now < draft.status.next_grant_time
