"""The watches of this operator, put together with what they feed."""

from collections.abc import Sequence

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.clocks import MACHINE, Sources

from .capacity.free_accelerators import FreeAccelerators
from .capacity.reservations import Reservations
from .client.api import Api
from .events import Listeners
from .node_health.health import NodeHealth
from .node_health.signals import Signals
from .store import KubeStore, ParsedJobs
from .watches import node_watch, other_pods
from .watches.follow import Awaited
from .watches.jobs import KnownJobs, ListedJobs
from .watches.node_watch import NodeWatch
from .watches.other_pods import OtherPods
from .watches.pod_watch import PodWatch

#: Watches that an operator of all namespaces waits for before it decides about jobs, unless the cluster refuses them.
AWAITED = (node_watch.PATH, other_pods.NAME)


class WatchedCluster:
    """What this operator's watches know of the cluster.

    It watches nodes and pods of other owners only if it watches all namespaces.

    Args:
        api: client of the API server.
        namespaces: names of the namespaces to watch; all when empty.
        signals: taints and conditions of nodes that are drained or unhealthy.
        sources: clocks, and names of events.

    Attributes:
        events: tells listeners what happens. Add them before the watches run.
        store: jobs in the API server.
        jobs: all jobs, as kopf's watch shows them.
        pods: the pods of all workers.
        nodes: which nodes have a problem, as the watch of nodes shows it.
        free: free accelerators of each node, as the watches of nodes and pods show them.
        others: pods of other owners; None if they are not watched.
        node_watch: the watch of all nodes; None if they are not watched.
        reservations: which jobs reserved free accelerators; None if nodes are not watched.
    """

    def __init__(self, api: Api, namespaces: Sequence[str], signals: Signals, sources: Sources = MACHINE) -> None:
        self.events = Listeners()
        self.nodes = NodeHealth(sources.now, self.events, signals)
        self.free = FreeAccelerators(self.nodes)
        parsed = ParsedJobs()
        self.jobs = KnownJobs(api, parsed, self.events)
        self.pods = PodWatch(api, namespaces, self.events, None if namespaces else self.free)
        self.others: OtherPods | None = None
        self.node_watch: NodeWatch | None = None
        self.reservations: Reservations | None = None
        awaited: list[Awaited] = []
        if not namespaces:
            self.others = OtherPods(api, self.free, sources.seconds, self.events)
            self.node_watch = NodeWatch(api, self, self.events)
            self.reservations = Reservations(self.free, [self.others, self.pods], self.events)
            awaited = [self.others, self.node_watch]
        self.store = KubeStore(api, ListedJobs(self.jobs, self.pods, awaited), parsed, sources)

    @property
    def seen_nodes(self) -> NodeHealth | None:
        """`nodes`, or None where they are not watched."""
        return self.nodes if self.reservations is not None else None

    def on_node_changed(self, node: Object, *, deleted: bool) -> None:
        """See `NodeListener`."""
        news = self.nodes.note(node, deleted=deleted)
        # `free` comes second, because it asks `nodes` whether the node takes pods.
        self.free.note_node(node, deleted=deleted)
        if news:
            self.events.on_nodes_changed()
