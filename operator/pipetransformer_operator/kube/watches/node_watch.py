"""The watch of nodes."""

from typing import Protocol

from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.kube.client.api import Api
from pipetransformer_operator.kube.events import ClusterListener

from .follow import Awaited, follow

PATH = "/api/v1/nodes"


class NodeListener(Protocol):
    """Is told of nodes."""

    def on_node_changed(self, node: Object, *, deleted: bool) -> None:
        """The node is new, has changed or is gone. If it is gone, `node` may hold only its name."""
        ...


class NodeWatch(Awaited):
    """Watches all nodes, and tells a listener of each that is new, has changed or is gone.

    Args:
        api: client of the API server.
        nodes: is told of each node.
        events: is told how the watch does.
    """

    def __init__(self, api: Api, nodes: NodeListener, events: ClusterListener) -> None:
        super().__init__(PATH, events)
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
        self.on_answered()
        return version

    def _note(self, node: Object, *, deleted: bool = False) -> None:
        name = node["metadata"]["name"]
        if deleted:
            self._known.pop(name, None)
        else:
            self._known[name] = None
        self._nodes.on_node_changed(node, deleted=deleted)
