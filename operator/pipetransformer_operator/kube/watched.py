"""What this operator's watches know of the cluster, put together."""

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
    """See the module. Nodes and pods of other owners are watched only if all namespaces are.

    Args:
        api: of the cluster.
        namespaces: to watch; all when empty.
        signals: taints and conditions of nodes that are drained or unhealthy.
        sources: of times and names.

    Attributes:
        events: tells listeners what happens. Add them before the watches run.
        store: jobs in the API server.
        jobs: as kopf's watch shows them.
        pods: of workers.
        nodes: with a problem, as the watch of nodes tells it.
        free: accelerators of each node, as the watch of nodes tells it.
        others: pods of other owners; None where they are not watched.
        node_watch: of all nodes; None where they are not watched.
        reservations: of free accelerators; None where nodes are not watched.
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
