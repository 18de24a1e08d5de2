"""Asks jobs to release claimed pipelines while pods of other owners wait: one job, one pipeline at a time.

An operator that restarts forgets what it asked, and at worst asks once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipetransformer_contract.api.status import Share
from pipetransformer_operator.plan import Claims, PendingPod, choose_claim


class WaitingPods(Protocol):
    """Knows the pods of other owners."""

    def waiting(self) -> Sequence[PendingPod]:
        """Pods that have waited for a node for some time."""
        ...


class ReleaseForOthers:
    """Chooses the job that is asked to release a pipeline, and remembers the request until the job has answered.

    Args:
        others: knows the pods of other owners that wait.
    """

    def __init__(self, others: WaitingPods) -> None:
        self._others = others
        self._given: dict[str, int] = {}
        self._asked: _Asked | None = None

    def look(self, claims: Sequence[Claims]) -> dict[str, Share]:
        """Returns the smaller share of the job that is asked for a pipeline, by its key; empty if no job is asked."""
        waiting = self._others.waiting()
        self._given = {pod.uid: self._given[pod.uid] for pod in waiting if pod.uid in self._given}
        if self._asked is not None and (given := self._asked.given(claims)) is not None:
            if self._asked.pod in self._given:
                self._given[self._asked.pod] += given - self._asked.workers
            self._asked = None
        if self._asked is None and (found := choose_claim(waiting, claims, self._given)):
            claim, uid = found.claim, found.pod.uid
            assert claim.next_smaller is not None
            share = Share(
                workers=claim.next_smaller, layout_generation=claim.layout_generation, for_others=True, node=found.node
            )
            self._asked = _Asked(uid, claim.key, claim.workers - claim.next_smaller, share)
            self._given[uid] = self._given.get(uid, 0) + self._asked.workers
        return {self._asked.key: self._asked.share} if self._asked else {}


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request to a job to release workers for a pod."""

    pod: str
    key: str
    workers: int
    share: Share

    def given(self, claims: Sequence[Claims]) -> int | None:
        """How many workers the job released; 0 if it cannot release any. None: it has not decided yet."""
        claim = next((claim for claim in claims if claim.key == self.key), None)
        if claim is None:
            return self.workers
        if claim.layout_generation == self.share.layout_generation:
            return None if claim.able else 0  # a job that lost workers meanwhile may wait for others for hours
        if not claim.settled:
            return None
        return self.workers if claim.workers <= self.share.workers else 0
