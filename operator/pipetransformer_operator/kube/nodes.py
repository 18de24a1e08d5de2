"""Nodes that something is wrong with: as the watch last showed them, and as workers' silence lets one doubt them."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

#: Deleted nodes that are remembered: pods that were bound to them are cleared away within a minute or two.
DELETED = 1000
#: By these taints Karpenter and the cluster autoscaler mark a node that they empty, where others would cordon it.
EMPTIED = frozenset({"karpenter.sh/disrupted", "karpenter.sh/disruption", "ToBeDeletedByClusterAutoscaler"})
#: For jobs that it did nothing to an unfit node is unfit for so long at most: by then the cluster knows what it is.
UNFIT_FOR_OTHERS = timedelta(seconds=60)
#: In place of a job's uid.
_ANY = ""

_Key = TypeVar("_Key")


class Nodes:
    """See the module.

    Args:
        clock: the present time, aware of its zone.

    Attributes:
        cordoned: names of those that take no pods any more, as somebody empties them.
        lost: names of those whose kubelet is not heard, or says that it runs nothing, and of deleted ones.
    """

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self.cordoned: set[str] = set()
        self.lost: set[str] = set()
        self._deleted: dict[str, None] = {}
        self._doubted: dict[str, datetime] = {}
        self._unfit: dict[tuple[str, str], datetime] = {}  # by job and name

    def note(self, node: Mapping[str, Any], *, deleted: bool) -> bool:
        """Takes what the watch showed; whether that is news."""
        conditions = node.get("status", {}).get("conditions", [])
        ready = next((one["status"] for one in conditions if one["type"] == "Ready"), "True")
        name, news = node["metadata"]["name"], False
        for names, holds in (
            (self.cordoned, not deleted and _is_cordoned(node.get("spec", {}))),
            (self.lost, deleted or ready != "True"),
        ):
            news |= holds != (name in names)
            (names.add if holds else names.discard)(name)
        self._deleted.pop(name, None)
        if deleted:
            self._deleted[name] = None
            if len(self._deleted) > DELETED:
                oldest = next(iter(self._deleted))
                del self._deleted[oldest]
                self.lost.discard(oldest)
        return news

    def doubt(self, job: str, silent: Mapping[str, datetime], unfit: Mapping[str, datetime]) -> None:
        """Workers of the job with that uid fell silent there; or were rejected, or had an accelerator that failed. None
        is sent there until the time given, as long as another node will do. Who waits for a word of a silent node waits
        less; an unfit one lives, and may just be slow, or have no room for this job's workers alone."""
        soon = self._clock() + UNFIT_FOR_OTHERS
        _extend(self._doubted, silent)
        _extend(self._unfit, {(job, name): until for name, until in unfit.items()})
        _extend(self._unfit, {(_ANY, name): min(until, soon) for name, until in unfit.items()})

    def doubts(self, name: str) -> bool:
        """Whether workers there fell silent lately."""
        return name in self._doubted and self._clock() < self._doubted[name]

    def is_closed(self, name: str) -> bool:
        """Whether the node takes no pods now."""
        return name in self.cordoned or name in self.lost

    def is_gone(self, name: str) -> bool:
        """Whether the node was deleted: what ran there will not come back, whatever the way to it is like."""
        return name in self._deleted

    @property
    def doubted(self) -> list[str]:
        """Names of those where workers fell silent lately."""
        return sorted(self._until_now(self._doubted))

    def unfit(self, job: str) -> list[str]:
        """Names of those that lately rejected workers, or had an accelerator that failed; for longer the job's own."""
        return sorted({name for of, name in self._until_now(self._unfit) if of in (job, _ANY)})

    def _until_now(self, known: dict[_Key, datetime]) -> list[_Key]:
        for key in [key for key, until in known.items() if self._clock() >= until]:
            del known[key]
        return list(known)


def _is_cordoned(spec: Mapping[str, Any]) -> bool:
    taints = spec.get("taints") or ()
    emptied = any(taint["key"] in EMPTIED and taint["effect"] != "PreferNoSchedule" for taint in taints)
    return bool(spec.get("unschedulable")) or emptied


def _extend(known: dict[_Key, datetime], told: Mapping[_Key, datetime]) -> None:
    for key, until in told.items():
        known[key] = max(until, known.get(key, until))
