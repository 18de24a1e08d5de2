"""Nodes that something is wrong with, as the watch last showed them: all others are forgotten."""

from collections.abc import Mapping
from typing import Any


class Nodes:
    """See the module.

    Attributes:
        cordoned: names of those that take no pods any more.
        lost: names of those whose kubelet is not heard, or says that it runs nothing.
    """

    def __init__(self) -> None:
        self.cordoned: set[str] = set()
        self.lost: set[str] = set()

    def note(self, node: Mapping[str, Any], *, deleted: bool) -> bool:
        """Takes what the watch showed; whether that is news."""
        conditions = node.get("status", {}).get("conditions", [])
        ready = next((one["status"] for one in conditions if one["type"] == "Ready"), "True")
        name, news = node["metadata"]["name"], False
        for names, holds in (
            (self.cordoned, bool(node.get("spec", {}).get("unschedulable"))),
            (self.lost, ready != "True"),
        ):
            holds = holds and not deleted
            news |= holds != (name in names)
            (names.add if holds else names.discard)(name)
        return news
