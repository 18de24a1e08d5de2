"""Asks jobs for claimed pipelines while pods of others wait: one job, one pipeline at a time.

What it remembers is lost with the operator, and then asked for once more at worst.
"""

from collections.abc import Callable, Sequence

from ..api.status import Share
from ..plan import Claims, Waiting, choose_claim


class Yielding:
    """See the module.

    Args:
        waiting: pods of others that wait now.
    """

    def __init__(self, waiting: Callable[[], Sequence[Waiting]]) -> None:
        self._waiting = waiting
        self._given: dict[str, int] = {}
        self._asked: tuple[str, Share] | None = None

    def look(self, claims: Sequence[Claims]) -> dict[str, Share]:
        """What each job may have that is asked for a pipeline, by the job's key."""
        waiting = self._waiting()
        self._given = {pod.uid: self._given[pod.uid] for pod in waiting if pod.uid in self._given}
        if self._asked is not None and _is_done(*self._asked, claims):
            self._asked = None
        if self._asked is None and (found := choose_claim(waiting, claims, self._given)):
            pod, claim = found
            assert claim.fewer is not None
            self._given[pod.uid] = self._given.get(pod.uid, 0) + claim.workers - claim.fewer
            share = Share(workers=claim.fewer, layout_generation=claim.layout_generation, yields=True)
            self._asked = claim.key, share
        return dict([self._asked]) if self._asked else {}


def _is_done(key: str, share: Share, claims: Sequence[Claims]) -> bool:
    """Whether the job has given what it was asked for, or cannot."""
    claim = next((claim for claim in claims if claim.key == key), None)
    if claim is None:
        return True
    if claim.layout_generation == share.layout_generation:
        return claim.fewer is None
    return claim.settled
