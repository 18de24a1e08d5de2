"""When a job may try again to start or to resize after an attempt failed, and when an attempt gets more time.

The wait before each attempt is twice as long as the last one, up to a limit.
"""

from datetime import timedelta

from pipetransformer_contract.api.status import LayoutSize, Reason
from pipetransformer_contract.layout import Layout
from pipetransformer_operator.plan.draft import Draft
from pipetransformer_operator.plan.view import View

#: The first wait after a failed attempt, and the longest one of a job that trains.
FIRST_BACKOFF = timedelta(seconds=60)
LONGEST_BACKOFF = timedelta(hours=1)
#: The longest wait of a job that does not train. It tries more often, because it has nothing else to do.
LONGEST_START_BACKOFF = timedelta(minutes=5)
#: How often the time of a preparation may restart because the cluster removed a joiner.
RENEWALS = 4


def back_off(draft: Draft) -> timedelta:
    """Postpones the next attempt to resize. The wait doubles with each failed attempt in a row. Returns the wait."""
    return _back_off(draft, LONGEST_BACKOFF)


def back_off_start(draft: Draft, reason: Reason) -> timedelta:
    """Like `back_off`, for a job that does not train. Its longest wait is shorter. Returns the wait.

    If the attempt failed because no nodes were free (`reason`), `wake` ends the wait once accelerators are released."""
    wait = _back_off(draft, LONGEST_START_BACKOFF)
    if reason in (Reason.UNSCHEDULABLE, Reason.GAVE_WAY):
        draft.update(waits_for_nodes_since=draft.now)
    return wait


def _back_off(draft: Draft, longest: timedelta) -> timedelta:
    failures = draft.status.resize_failures
    wait = min(longest, FIRST_BACKOFF * (1 << min(failures, 16)))
    draft.update(resize_failures=failures + 1, next_resize_time=draft.now + wait, waits_for_nodes_since=None)
    return wait


def wake(draft: Draft) -> None:
    """Ends the wait of a job that found no free nodes, if accelerators became free or other jobs give way to it."""
    since, observed = draft.status.waits_for_nodes_since, draft.observed
    if since is None or not draft.view.asleep:
        return
    if observed.preferred_since or (observed.released or since) > since:
        draft.update(next_resize_time=None, waits_for_nodes_since=None)


def try_at_once(draft: Draft) -> None:
    """Ends the wait after failed attempts, because the next attempt has another purpose."""
    draft.update(resize_failures=0, next_resize_time=None, waits_for_nodes_since=None)


def forget_failures(draft: Draft) -> None:
    """Forgets failed attempts, because one succeeded or the job's spec changed."""
    try_at_once(draft)
    draft.update(not_committed=None, slow_starts=0, unused_shares=0, sits_out_until=None)


def recently_not_committed(view: View, layout: Layout) -> bool:
    """Whether the workers recently failed to commit this layout, and the wait after that is not over."""
    return view.status.not_committed == LayoutSize.of(layout) and view.asleep_and_wakes()


def renew(draft: Draft) -> None:
    """Restarts the time of a preparation, because the cluster removed joiners and new ones replace them.

    This happens at most `RENEWALS` times."""
    prepared = draft.view.preparation
    assert prepared is not None
    if may_renew(draft.view):
        draft.update(resize=prepared.model_copy(update={"renewals": prepared.renewals + 1}))
        draft.restart_preparation(draft.now)


def may_renew(view: View) -> bool:
    """Whether a job that trains prepares a resize, and its time may restart once more."""
    prepared = view.prepared_resize
    return prepared is not None and prepared.renewals < RENEWALS
