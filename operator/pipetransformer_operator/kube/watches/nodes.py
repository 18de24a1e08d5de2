"""Nodes that something is wrong with: as the watch last showed them, and as workers' silence lets one doubt them."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from pipetransformer_operator.kube.capacity.quantity import whole
from pipetransformer_operator.plan import AVOIDED, FAILURES_ALLOWED

from .signals import Signals

#: Deleted nodes that are remembered: pods that were bound to them are cleared away within a minute or two.
DELETED = 1000
#: An accelerator that failed is remembered for so long: a second one on the same node is no accident then.
REMEMBERED = timedelta(days=1)
#: For jobs that it did nothing to an unfit node is unfit for so long at most: by then the cluster knows what it is.
UNFIT_FOR_OTHERS = timedelta(seconds=60)
#: In place of a job's uid.
_ANY = ""

_Key = TypeVar("_Key")


class Nodes:
    """See the module.

    Args:
        clock: the present time, aware of its zone.
        appeared: called when a node appears, takes pods again, or shows more accelerators than before.
        signals: by which taints and conditions nodes are emptied, or not well.

    Attributes:
        cordoned: names of those that workers leave: they are cordoned, emptied by other means, or not well.
        why: by name of those, the mark that says so.
        unhealthy: names of those that are not well.
        lost: names of those whose kubelet is not heard, or says that it runs nothing, and of deleted ones.
    """

    def __init__(
        self,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        appeared: Callable[[], None] = lambda: None,
        signals: Signals | None = None,
    ) -> None:
        self._clock = clock
        self._signals = signals or Signals()
        self._appeared = appeared
        self._offers: dict[str, dict[str, int]] = {}  # by name of a node that takes pods: its extended resources
        self.cordoned: set[str] = set()
        self.why: dict[str, str] = {}
        self.unhealthy: set[str] = set()
        self.lost: set[str] = set()
        self._deleted: dict[str, None] = {}
        self._doubted: dict[str, datetime] = {}
        self._unfit: dict[tuple[str, str], datetime] = {}  # by job and name
        self._broken: dict[str, dict[str, datetime]] = {}  # by name, and uid of the worker whose accelerator failed
        self._avoided: dict[str, datetime] = {}

    def note(self, node: Mapping[str, Any], *, deleted: bool) -> bool:
        """Takes what the watch showed; whether that is news."""
        conditions = node.get("status", {}).get("conditions", [])
        ready = next((one["status"] for one in conditions if one["type"] == "Ready"), "True")
        name = node["metadata"]["name"]
        illness = "" if deleted else self._signals.unhealthy.why(node)
        why = "" if deleted else self._why_cordoned(node) or illness
        news = why != self.why.pop(name, "")
        if why:
            self.why[name] = why
        for names, holds in (
            (self.cordoned, bool(why)),
            (self.unhealthy, bool(illness)),
            (self.lost, deleted or ready != "True"),
        ):
            news |= holds != (name in names)
            (names.add if holds else names.discard)(name)
        self._compare(name, node.get("status", {}))
        self._deleted.pop(name, None)
        if deleted:
            self._deleted[name] = None
            if len(self._deleted) > DELETED:
                oldest = next(iter(self._deleted))
                del self._deleted[oldest]
                self.lost.discard(oldest)
        return news

    def _compare(self, name: str, status: Mapping[str, Any]) -> None:
        """Tells of a node that has more room than before; a device plugin adds its accelerators after the node."""
        if name in self.cordoned or name in self.lost:
            self._offers.pop(name, None)
            return
        before, after = self._offers.get(name), _extended(status)
        self._offers[name] = after
        if before is None or any(number > before.get(resource, 0) for resource, number in after.items()):
            self._appeared()

    def doubt(self, job: str, silent: Mapping[str, datetime], unfit: Mapping[str, datetime]) -> None:
        """Workers of the job with that uid fell silent there; or were rejected, or had an accelerator that failed. None
        is sent there until the time given, as long as another node will do. Who waits for a word of a silent node waits
        less; an unfit one lives, and may just be slow, or have no room for this job's workers alone."""
        soon = self._clock() + UNFIT_FOR_OTHERS
        _extend(self._doubted, silent)
        _extend(self._unfit, {(job, name): until for name, until in unfit.items()})
        _extend(self._unfit, {(_ANY, name): min(until, soon) for name, until in unfit.items()})

    def blame(self, broken: Mapping[str, str]) -> None:
        """The accelerators of workers failed: by the worker's uid, on which node. The same worker counts once."""
        now = self._clock()
        for uid, name in broken.items():
            known = self._broken.setdefault(name, {})
            if uid not in known:
                known[uid] = now
                if self.failures[name] > FAILURES_ALLOWED:
                    self._avoided[name] = now + AVOIDED

    @property
    def failures(self) -> dict[str, int]:
        """By name, how many workers' accelerators failed there lately."""
        oldest = self._clock() - REMEMBERED
        for name, known in list(self._broken.items()):
            left = {uid: time for uid, time in known.items() if time > oldest}
            self._broken[name] = left
            if not left:
                del self._broken[name]
        return {name: len(known) for name, known in self._broken.items()}

    @property
    def avoided(self) -> dict[str, datetime]:
        """Until when no worker is sent to nodes on which accelerators failed more than once."""
        self._until_now(self._avoided)
        return dict(self._avoided)

    def _why_cordoned(self, node: Mapping[str, Any]) -> str:
        if node.get("spec", {}).get("unschedulable"):
            return "cordoned"
        return self._signals.drain.why(node)

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
        """Names of those that are not well, or lately rejected workers, or had an accelerator that failed; for longer
        the job's own."""
        return sorted(self.unhealthy | {name for of, name in self._until_now(self._unfit) if of in (job, _ANY)})

    def _until_now(self, known: dict[_Key, datetime]) -> list[_Key]:
        for key in [key for key, until in known.items() if self._clock() >= until]:
            del known[key]
        return list(known)


def _extended(status: Mapping[str, Any]) -> dict[str, int]:
    """What the node has for pods, of resources with a domain in their name, as accelerators have."""
    found = {name: whole(amount) for name, amount in status.get("allocatable", {}).items() if "/" in name}
    return {name: number for name, number in found.items() if number}


def _extend(known: dict[_Key, datetime], told: Mapping[_Key, datetime]) -> None:
    for key, until in told.items():
        known[key] = max(until, known.get(key, until))
