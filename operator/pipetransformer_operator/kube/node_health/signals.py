"""Taints and conditions that mark a node as being drained, or as unhealthy.

Kubernetes itself has one mark for both, the cordon. Autoscalers, clouds and health monitors have their own: the chart's
value `nodes` names them, and its defaults are here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Effect of a taint that only asks to prefer other nodes: the node is a candidate, but is not being drained yet.
_MILD = "PreferNoSchedule"
_EFFECTS = ("NoSchedule", _MILD, "NoExecute")


class Taint(NamedTuple):
    """A taint to look for: `key`, `key=value`, `key:effect` or `key=value:effect`, as kubectl writes them."""

    key: str
    value: str | None = None
    effect: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Taint":
        """Reads a taint in one of the four forms.

        Raises:
            ValueError: the text has none of these forms, or an unknown effect.
        """
        rest, colon, effect = text.partition(":")
        key, equals, value = rest.partition("=")
        if not key or (colon and effect not in _EFFECTS):
            raise ValueError(f"invalid taint {text!r}: expected key, key=value, key:effect or key=value:effect")
        return cls(key, value if equals else None, effect if colon else None)

    def found_in(self, taint: Mapping[str, Any]) -> bool:
        """Whether a node's taint is this one. A taint that is only a preference matches only with its effect."""
        if taint.get("key") != self.key or self.value not in (None, taint.get("value", "")):
            return False
        effect = str(taint.get("effect"))
        return effect == self.effect if self.effect else effect != _MILD


class NodeCondition(NamedTuple):
    """A condition to look for: `Type=Status`, or `Type`, which means `Type=True`."""

    type: str
    status: str = "True"

    @classmethod
    def parse(cls, text: str) -> "NodeCondition":
        """Reads a condition in one of the two forms.

        Raises:
            ValueError: the text has no type, or an unknown status.
        """
        kind, _, status = text.partition("=")
        if not kind or status not in ("", "True", "False", "Unknown"):
            raise ValueError(
                f"invalid condition {text!r}: expected Type or Type=Status, with status True, False or Unknown"
            )
        return cls(kind, status or "True")


@dataclass(frozen=True, slots=True)
class Marks:
    """Taints and conditions of one meaning."""

    taints: tuple[Taint, ...] = ()
    conditions: tuple[NodeCondition, ...] = ()

    @classmethod
    def parse(cls, value: Mapping[str, Sequence[str]]) -> "Marks":
        """Reads `taints` and `conditions`.

        Raises:
            ValueError: one of them is invalid.
        """
        return cls(
            tuple(map(Taint.parse, value.get("taints", ()))),
            tuple(map(NodeCondition.parse, value.get("conditions", ()))),
        )

    def why(self, node: Mapping[str, Any]) -> str:
        """The first of these marks that the node has, in words; empty if it has none."""
        for taint in node.get("spec", {}).get("taints") or ():
            if any(mark.found_in(taint) for mark in self.taints):
                return f"taint {taint['key']}"
        for condition in node.get("status", {}).get("conditions") or ():
            if (condition["type"], condition["status"]) in self.conditions:
                return f"condition {condition['type']}={condition['status']}"
        return ""


#: The chart's values.yaml says which software sets each of them.
DEFAULT_DRAIN = {
    "taints": [
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "ToBeDeletedByClusterAutoscaler",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
    ],
    "conditions": ["VMEventScheduled"],
}
DEFAULT_UNHEALTHY = {
    "taints": ["AggregatedNodeHealth=False"],
    "conditions": [
        "KernelDeadlock",
        "ReadonlyFilesystem",
        "AcceleratedHardwareReady=False",
        "ContainerRuntimeReady=False",
        "KernelReady=False",
        "NetworkingReady=False",
        "StorageReady=False",
        "GPUMissing",
        "NVLinkStatusInactive",
        "XIDErrors",
        "UnhealthyNvidiaDevicePlugin",
    ],
}


@dataclass(frozen=True, slots=True)
class Signals:
    """Marks that nodes are watched for.

    Attributes:
        drain: marks of a node that is being drained.
        unhealthy: marks of an unhealthy node.
    """

    drain: Marks = field(default_factory=lambda: Marks.parse(DEFAULT_DRAIN))
    unhealthy: Marks = field(default_factory=lambda: Marks.parse(DEFAULT_UNHEALTHY))

    @classmethod
    def parse(cls, value: Mapping[str, Mapping[str, Sequence[str]]]) -> "Signals":
        """Reads the chart's value `nodes`.

        Raises:
            ValueError: a mark is invalid.
        """
        return cls(Marks.parse(value.get("drain", {})), Marks.parse(value.get("unhealthy", {})))
