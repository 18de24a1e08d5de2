"""Workers that the cluster refuses to delete: its explanation, and when to try again.

A policy, a webhook or a missing right may last as long as the job. So the pauses between attempts grow, and everything
else that the job needs continues meanwhile.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipetransformer_operator.plan import Deletion


@dataclass(frozen=True, slots=True)
class _Refusal:
    words: str
    pause: float
    again: float


class RefusedDeletions:
    """Remembers which workers of a job the cluster refuses to delete. Times are seconds of one clock that only grows.

    Args:
        first: pause after the first refusal; doubles each time.
        longest: longest pause.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._refused: dict[str, _Refusal] = {}

    @property
    def explanations(self) -> Mapping[str, str]:
        """The cluster's last explanation, by UID of the worker."""
        return {uid: refusal.words for uid, refusal in self._refused.items()}

    def due(self, wanted: Iterable[Deletion], now: float) -> list[Deletion]:
        """Returns those of the wanted deletions to try now, and forgets refusals of all others.

        A worker whose deletion is no longer wanted ends, or is gone."""
        wanted = list(wanted)
        uids = {one.uid for one in wanted}
        self._refused = {uid: refusal for uid, refusal in self._refused.items() if uid in uids}
        return [one for one in wanted if one.uid not in self._refused or now >= self._refused[one.uid].again]

    def add(self, uid: str, words: str, now: float) -> float:
        """Notes that the cluster refused to delete this pod. Returns the seconds to wait before the next attempt."""
        before = self._refused.get(uid)
        pause = min(2 * before.pause, self._longest) if before else self._first
        self._refused[uid] = _Refusal(words, pause, now + pause)
        return pause

    def remove(self, uid: str) -> None:
        """Notes that the cluster accepted the deletion of this pod."""
        self._refused.pop(uid, None)

    def seconds_until_due(self, now: float) -> float | None:
        """Seconds until an attempt is due; None if none was refused."""
        again = min((refusal.again for refusal in self._refused.values()), default=None)
        return None if again is None else max(0.1, again - now)
