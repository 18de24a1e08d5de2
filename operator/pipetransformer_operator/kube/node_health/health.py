"""Nodes with a problem: what the watch last showed of them, and what silent or failed workers suggest."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar

from pipetransformer_operator.clocks import Clock, utc_now
from pipetransformer_operator.kube.capacity.node_fit import NodeView, is_extended, node_view
from pipetransformer_operator.kube.events import NO_LISTENER, ClusterListener
from pipetransformer_operator.plan import AVOIDED, FAILURES_ALLOWED

from .signals import Signals

#: Deleted nodes to remember: Kubernetes removes the pods that were bound to them within a minute or two.
DELETED = 1000
#: How long a failed accelerator is remembered: a second one on the same node within this time is no accident.
REMEMBERED = timedelta(days=1)
#: How long other jobs also avoid a node that proved unfit for one job: by then the cluster knows about it.
UNFIT_FOR_OTHERS = timedelta(seconds=60)
#: Stands for all jobs, in place of a job's UID.
_ANY = ""

_Key = TypeVar("_Key")


class NodeHealth:
    """Knows which nodes have a problem, and which of them new workers of a job avoid.

    Args:
        clock: the present time, with its time zone.
        events: is told when a node appears, takes pods again or more kinds of them, or has more accelerators.
        signals: taints and conditions of nodes that are drained or unhealthy.

    Attributes:
        draining: names of nodes that workers leave: they are cordoned, drained by other means, or unhealthy.
        why_draining: the mark that says so, by name of the node.
        unhealthy: names of unhealthy nodes.
        lost: names of nodes that were deleted, or whose kubelet is silent or says that it runs nothing.
    """

    def __init__(
        self,
        clock: Clock = utc_now,
        events: ClusterListener = NO_LISTENER,
        signals: Signals | None = None,
    ) -> None:
        self._clock = clock
        self._signals = signals or Signals()
        self._events = events
        self._offers: dict[str, NodeView] = {}  # by name of each node that takes pods
        self.draining: set[str] = set()
        self.why_draining: dict[str, str] = {}
        self.unhealthy: set[str] = set()
        self.lost: set[str] = set()
        self._deleted: dict[str, None] = {}
        self._doubted: dict[str, datetime] = {}
        self._unfit: dict[tuple[str, str], datetime] = {}  # by job and name
        self._broken: dict[str, dict[str, datetime]] = {}  # by node, and UID of the worker whose accelerator failed
        self._avoided: dict[str, datetime] = {}

    def note(self, node: Mapping[str, Any], *, deleted: bool) -> bool:
        """Takes what the watch showed. Returns whether it is news."""
        conditions = node.get("status", {}).get("conditions", [])
        ready = next((one["status"] for one in conditions if one["type"] == "Ready"), "True")
        name = node["metadata"]["name"]
        illness = "" if deleted else self._signals.unhealthy.why(node)
        why = "" if deleted else self._why_draining(node) or illness
        news = why != self.why_draining.pop(name, "")
        if why:
            self.why_draining[name] = why
        news |= _mark(self.draining, name, holds=bool(why))
        news |= _mark(self.unhealthy, name, holds=bool(illness))
        news |= _mark(self.lost, name, holds=deleted or ready != "True")
        self._compare(name, node)
        self._deleted.pop(name, None)
        if deleted:
            self._deleted[name] = None
            if len(self._deleted) > DELETED:
                oldest = next(iter(self._deleted))
                del self._deleted[oldest]
                self.lost.discard(oldest)
        return news

    def _compare(self, name: str, node: Mapping[str, Any]) -> None:
        """Tells the listener if a node has more for pods than before, as when a device plugin adds accelerators."""
        if name in self.draining or name in self.lost:
            self._offers.pop(name, None)
            return
        before, after = self._offers.get(name), node_view(node)
        self._offers[name] = after
        if before is None or _has_more(before, after):
            self._events.on_accelerators_released(None)

    def doubt(self, job: str, silent: Mapping[str, datetime], unfit: Mapping[str, datetime]) -> None:
        """Notes nodes that new workers avoid until the time given, if another node will do.

        Args:
            job: UID of the job whose workers had trouble there.
            silent: nodes where its workers fell silent.
            unfit: nodes that rejected its workers, or whose accelerators failed. Other jobs avoid them for a shorter
                time, because the node may be slow or lack room only for this job's workers.
        """
        soon = self._clock() + UNFIT_FOR_OTHERS
        _extend(self._doubted, silent)
        _extend(self._unfit, {(job, name): until for name, until in unfit.items()})
        _extend(self._unfit, {(_ANY, name): min(until, soon) for name, until in unfit.items()})

    def blame(self, failed_devices: Mapping[str, str]) -> None:
        """Notes failed accelerators. `failed_devices` has the node by UID of the worker. Each worker counts once."""
        now = self._clock()
        for uid, name in failed_devices.items():
            known = self._broken.setdefault(name, {})
            if uid not in known:
                known[uid] = now
                if self.failures[name] > FAILURES_ALLOWED:
                    self._avoided[name] = now + AVOIDED

    @property
    def failures(self) -> dict[str, int]:
        """How many workers' accelerators failed within `REMEMBERED`, by node."""
        oldest = self._clock() - REMEMBERED
        for name, known in list(self._broken.items()):
            left = {uid: time for uid, time in known.items() if time > oldest}
            self._broken[name] = left
            if not left:
                del self._broken[name]
        return {name: len(known) for name, known in self._broken.items()}

    @property
    def avoided(self) -> dict[str, datetime]:
        """Nodes on which accelerators failed repeatedly, and until when no worker is sent there."""
        return {name: self._avoided[name] for name in self._unexpired(self._avoided)}

    def _why_draining(self, node: Mapping[str, Any]) -> str:
        if node.get("spec", {}).get("unschedulable"):
            return "cordoned"
        return self._signals.drain.why(node)

    def doubts(self, name: str) -> bool:
        """Whether workers of this node fell silent lately."""
        return name in self._doubted and self._clock() < self._doubted[name]

    def is_closed(self, name: str) -> bool:
        """Whether the node takes no pods now."""
        return name in self.draining or name in self.lost

    def is_gone(self, name: str) -> bool:
        """Whether the node was deleted: its workers will not come back."""
        return name in self._deleted

    @property
    def doubted(self) -> list[str]:
        """Names of nodes where workers fell silent lately."""
        return sorted(self._unexpired(self._doubted))

    def unfit(self, job: str) -> list[str]:
        """Names of nodes that are unhealthy, or that lately rejected workers or had an accelerator fail.

        For this job, trouble of its own workers counts for longer than that of other jobs' workers."""
        return sorted(self.unhealthy | {name for of, name in self._unexpired(self._unfit) if of in (job, _ANY)})

    def _unexpired(self, known: dict[_Key, datetime]) -> list[_Key]:
        """Returns the keys whose time lies ahead, and forgets all others."""
        for key in [key for key, until in known.items() if self._clock() >= until]:
            del known[key]
        return list(known)


def _mark(names: set[str], name: str, *, holds: bool) -> bool:
    """Adds the name if the mark `holds`, otherwise removes it. Returns whether that is news."""
    news = holds != (name in names)
    if holds:
        names.add(name)
    else:
        names.discard(name)
    return news


def _has_more(before: NodeView, after: NodeView) -> bool:
    """Whether the node may take pods that it did not take before: by accelerators, labels or a taint that is gone."""
    known = before.allocatable
    more = any(is_extended(name) and amount > known.get(name, 0) for name, amount in after.allocatable.items())
    return more or before.labels != after.labels or any(taint not in after.taints for taint in before.taints)


def _extend(known: dict[_Key, datetime], told: Mapping[_Key, datetime]) -> None:
    for key, until in told.items():
        known[key] = max(until, known.get(key, until))
