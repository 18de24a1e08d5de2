"""Nodes as the API server shows them: a list, then each change. A new list also tells which nodes are gone."""

from typing import Protocol

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.controller.ports import Refused
from pipetransformer_operator.kube.client.api import Api, NotFound
from pipetransformer_operator.kube.events import ClusterListener

from .follow import Reported, follow


class NodeListener(Protocol):
    """Is told of nodes."""

    def on_node_changed(self, node: Object, *, deleted: bool) -> None:
        """The node is new, has changed or is gone. Of one that is gone only the name may be known."""
        ...


class NodeWatch(Reported):
    """See the module.

    Args:
        api: of the cluster.
        nodes: is told of each node.
        events: is told how the watch does.

    Attributes:
        listed: whether all nodes were listed, or the cluster refuses that: then no job waits for them.
    """

    def __init__(self, api: Api, nodes: NodeListener, events: ClusterListener) -> None:
        super().__init__("/api/v1/nodes", events)
        self.listed = False
        self._api = api
        self._nodes = nodes
        self._known: dict[str, None] = {}

    async def run(self) -> None:
        """Watches until it is cancelled."""
        async for node, deleted in follow(self._api, self):
            self._note(node, deleted=deleted)

    async def relist(self) -> str:
        """See `Followed`."""
        gone, version = dict(self._known), ""
        async for part in self._api.list(self.path):
            version = part["metadata"]["resourceVersion"]
            for node in part["items"]:
                gone.pop(node["metadata"]["name"], None)
                self._note(node)
        for name in gone:
            self._note({"metadata": {"name": name}}, deleted=True)
        self._tell_listed()
        return version

    def on_failed(self, error: Exception) -> None:
        """See `Followed`."""
        super().on_failed(error)
        if isinstance(error, NotFound | Refused):
            self._tell_listed()

    def _tell_listed(self) -> None:
        if not self.listed:
            self.listed = True
            self._events.on_cluster_listed()

    def _note(self, node: Object, *, deleted: bool = False) -> None:
        name = node["metadata"]["name"]
        if deleted:
            self._known.pop(name, None)
        else:
            self._known[name] = None
        self._nodes.on_node_changed(node, deleted=deleted)
