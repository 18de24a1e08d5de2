"""The parts of an operator that need no socket, put together.

The service connects them to a cluster. Simulations run the same parts on an API server in memory.
"""

import sys
from typing import Protocol

from .channel.app import Channel
from .channel.listener import NO_LISTENER as NO_CHANNEL_LISTENER
from .channel.listener import ChannelListener
from .clocks import MACHINE, Sources
from .controller.manager import Controller
from .controller.ports import JobKey, LoopMetrics
from .kube.client.api import Api
from .kube.client.lease import Lease
from .kube.events import ClusterListener
from .kube.trust.authority import Publisher, Trust
from .kube.trust.tokens import TokenReviewer
from .kube.watched import WatchedCluster
from .kube.watches.jobs import KnownJobs
from .kube.watches.keeper import Keeper
from .kube.workers.pod_groups import SCHEDULERS, PodGroups
from .kube.workers.pool import KubePool
from .kube.workers.rendering import PriorityClasses
from .kueue.quota import KueueQuota, NoKueue
from .settings import Settings


class Watching(Protocol):
    """A part that watches the cluster."""

    async def run(self) -> None:
        """Watches until it is cancelled."""
        ...


class Assembly:
    """Watches, pool, quota, controller and channel of one operator, which know each other.

    Args:
        settings: settings of the operator.
        api: client of the API server, which writes only while the lease is held.
        lease: wakes all loops when it is gained.
        trust: says which certificates workers trust.
        watcher: is told which watches are opened or refused.
        metrics: is told what the loops do.
        requests: is told of the channel's requests.
        most_polls: largest number of workers' polls that may wait at a time.
        sources: clocks and random texts.

    Attributes:
        cluster: what the watches know.
        controller: all jobs' loops.
        quota: the quota of jobs with a queue.
        publisher: writes what workers trust.
        channel: the workers' API.
        watching: parts to run while this operator leads, in addition to the watch of jobs.
    """

    def __init__(
        self,
        settings: Settings,
        api: Api,
        lease: Lease,
        trust: Trust,
        watcher: ClusterListener,
        metrics: LoopMetrics | None = None,
        requests: ChannelListener = NO_CHANNEL_LISTENER,
        most_polls: int = sys.maxsize,
        sources: Sources = MACHINE,
    ) -> None:
        tokens, self.publisher = TokenReviewer(api, sources.epoch), Publisher(api, trust)
        self.cluster = cluster = WatchedCluster(api, settings.namespaces, settings.signals, sources)
        self.quota: KueueQuota | NoKueue = NoKueue(api, settings.namespaces)
        if settings.kueue:
            self.quota = KueueQuota(api, settings.namespaces, cluster.events, sources.now)
        pool = KubePool(
            api,
            cluster.pods,
            settings.channel_url,
            trust=self.publisher,
            nodes=cluster.seen_nodes,
            priority_classes=_priority_classes(settings),
            scraper=settings.scraper_namespace,
            quota=self.quota,
            reservations=cluster.reservations,
            clock=sources.now,
            pod_groups=PodGroups(api, SCHEDULERS[settings.gang_scheduling]) if settings.gang_scheduling else None,
        )
        self.controller = Controller(
            cluster.store,
            pool,
            clock=sources.now,
            metrics=metrics,
            quota=self.quota,
            others=cluster.others if settings.release_for_others else None,
            weigh_namespaces=settings.weigh_namespaces,
            token=sources.token,
        )
        waker = _Waker(self.controller, cluster.jobs)
        # Loops wake last, so that they see what the other listeners have noted.
        cluster.events.add(pool, self.quota, tokens, watcher, waker)
        lease.add(waker)
        keeper = Keeper(api, settings.namespaces, pool.protection, self.publisher, cluster.events)
        self.channel = Channel(self.controller.boards, tokens, requests, most_polls, sources.seconds)
        self.watching: list[Watching] = [cluster.jobs, cluster.pods, keeper, self.quota]
        self.watching += filter(None, [cluster.others, cluster.node_watch])


class _Waker(ClusterListener):
    """Wakes the loops of the jobs that an event concerns."""

    def __init__(self, controller: Controller, jobs: KnownJobs) -> None:
        self._controller = controller
        self._jobs = jobs

    def on_job_changed(self, key: JobKey) -> None:
        """See `ClusterListener`."""
        self._controller.wake(key)

    def on_job_gone(self, key: JobKey) -> None:
        """See `ClusterListener`."""
        self._controller.wake(key)

    def on_pod_changed(self, key: JobKey) -> None:
        """See `ClusterListener`."""
        self._controller.wake(key)

    def on_pod_gone(self, key: JobKey, uid: str) -> None:
        """See `ClusterListener`."""
        self._controller.wake(key)

    def on_pods_listed(self, namespace: str) -> None:
        """See `ClusterListener`."""
        for key in self._jobs.keys(namespace):
            self._controller.wake(key)

    def on_cluster_listed(self) -> None:
        """See `ClusterListener`."""
        self.on_pods_listed("")

    def on_nodes_changed(self) -> None:
        """See `ClusterListener`."""
        self._controller.wake_known(None)

    def on_accelerators_released(self, by: JobKey | None) -> None:
        """See `ClusterListener`."""
        self._controller.note_release(by)

    def on_reservation_returned(self, by: JobKey) -> None:
        """See `ClusterListener`."""
        self._controller.wake_waiting(by)

    def on_quota_changed(self, key: JobKey | None) -> None:
        """See `ClusterListener`."""
        self._controller.wake_known(key)

    def on_protection_touched(self, key: JobKey) -> None:
        """See `ClusterListener`."""
        self._controller.wake_known(key)

    def on_lease_gained(self) -> None:
        """See `LeaseListener`. Jobs whose writes failed meanwhile try again at once."""
        self._controller.wake_known(None)


def _priority_classes(settings: Settings) -> PriorityClasses:
    return PriorityClasses(
        base=settings.base_priority_class,
        claimed=settings.claim_priority_class,
        autoscaled=settings.autoscaled_priority_class,
    )
