"""What a pod asks of a node, and whether the node fits: resources, node selector, node affinity, taints.

This is the part of the scheduler's filter that depends on nodes alone. It ignores volumes, topology spread and affinity
between pods: a pod that fails by them is simply pending.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from pipetransformer_contract.api.requests import Object

from .quantity import thousandths

#: Amounts by resource, in thousandths of its unit, so that sums are exact.
Amounts = Mapping[str, int]
_HOLDS_OFF = ("NoSchedule", "NoExecute")
#: Fields of a pod's spec that, with its containers' resources, decide which nodes take it.
_DECIDES = ("nodeSelector", "affinity", "tolerations", "overhead", "resources")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_Quantities = dict[str, int | float | str] | None


class _Part(BaseModel):
    """A part of a pod's spec: the form of the fields that are read here, without all others."""

    model_config = ConfigDict(alias_generator=to_camel)


class _Requirement(_Part):
    key: str
    operator: str
    values: list[str] | None = None


class _Term(_Part):
    match_expressions: list[_Requirement] | None = None
    match_fields: list[_Requirement] | None = None


class _Required(_Part):
    node_selector_terms: list[_Term] | None = None


class _NodeAffinity(_Part):
    required_during_scheduling_ignored_during_execution: _Required | None = None


class _Affinity(_Part):
    node_affinity: _NodeAffinity | None = None


class _Toleration(_Part):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None


class _Resources(_Part):
    limits: _Quantities = None
    requests: _Quantities = None


class _Container(_Part):
    restart_policy: str | None = None
    resources: _Resources | None = None


class _Form(_Part):
    """The form of a pod's spec. A template may have anything in its place, which only the API server refuses."""

    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    node_selector: dict[str, str] | None = None
    affinity: _Affinity | None = None
    tolerations: list[_Toleration] | None = None
    overhead: _Quantities = None
    resources: _Resources | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the scheduler compares with a pod.

    Attributes:
        name: name of the node.
        allocatable: what pods may hold there in total.
        labels: its labels.
        taints: its taints.
    """

    name: str
    allocatable: Amounts
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, str]]


def node_view(node: Mapping[str, Any]) -> NodeView:
    """The view of a node as the API server gives it."""
    return NodeView(
        name=node["metadata"]["name"],
        allocatable=_amounts(node.get("status", {}).get("allocatable") or {}),
        labels=dict(node["metadata"].get("labels") or {}),
        taints=[dict(taint) for taint in node.get("spec", {}).get("taints") or ()],
    )


def is_extended(resource: str) -> bool:
    """Whether it is an extended resource, such as an accelerator: cpu, memory, pods and hugepages-2Mi have no domain
    in their name."""
    return "/" in resource and not resource.startswith("kubernetes.io/")


#: A required affinity without terms selects no node.
_NOWHERE: Object = {
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
}


@dataclass(frozen=True, slots=True)
class PodShape:
    """What a pod asks of a node. Two shapes are equal if the same nodes take both.

    Attributes:
        key: the same text for equal shapes.
        spec: the pod's spec.
        requests: what it holds on its node.
        unknown: why it is unknown which nodes take it, in words; empty if it is known.
    """

    key: str
    spec: Mapping[str, Any] = field(compare=False)
    requests: Amounts = field(compare=False)
    unknown: str = field(default="", compare=False)


def shape_of(spec: Mapping[str, Any]) -> PodShape:
    """The shape of pods of that spec. If the spec is malformed, no node takes them."""
    try:
        _Form.model_validate(spec)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        return PodShape("", _NOWHERE, requests_of({}), f"podTemplate.spec.{where} is invalid")
    decides: dict[str, Any] = {name: spec[name] for name in _DECIDES if spec.get(name)}
    requests = requests_of(spec)
    return PodShape(json.dumps([requests, decides], sort_keys=True, default=str), spec, requests)


def requests_of(spec: Mapping[str, Any]) -> dict[str, int]:
    """What a pod of this spec holds on its node, as the scheduler counts it, in thousandths of each resource's unit.

    Source: https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers.
    A container without a request has its limit as request, which the API server writes only once the pod is created.
    """
    sidecars: dict[str, int] = {}
    most: dict[str, int] = {}
    for init in spec.get("initContainers") or ():
        if init.get("restartPolicy") == "Always":
            _add(sidecars, _asked(init))
            alone = sidecars
        else:
            alone = dict(sidecars)
            _add(alone, _asked(init))
        most = {name: max(most.get(name, 0), alone.get(name, 0)) for name in {*most, *alone}}
    running = dict(sidecars)
    for container in spec.get("containers") or ():
        _add(running, _asked(container))
    total = {name: max(most.get(name, 0), running.get(name, 0)) for name in {*most, *running}}
    total |= _asked(spec)  # resources of the whole pod replace those of its containers
    _add(total, _amounts(spec.get("overhead") or {}))
    return {**{name: amount for name, amount in total.items() if amount}, "pods": 1000}


def allows(node: NodeView, spec: Mapping[str, Any]) -> bool:
    """Whether the node's labels, name and taints allow a pod of this spec."""
    selector: Mapping[str, str] = spec.get("nodeSelector") or {}
    if any(node.labels.get(key) != value for key, value in selector.items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required and not any(_term_matches(node, term) for term in required.get("nodeSelectorTerms") or ()):
        return False
    tolerations = spec.get("tolerations") or ()
    return all(
        taint.get("effect") not in _HOLDS_OFF or any(_tolerates(one, taint) for one in tolerations)
        for taint in node.taints
    )


def fits(left: Amounts, requests: Amounts) -> int:
    """How many pods with these `requests` fit into what is `left` of a node, by resources alone."""
    return max(0, min(left.get(name, 0) // amount for name, amount in requests.items()))


def _asked(holder: Mapping[str, Any]) -> dict[str, int]:
    resources = holder.get("resources") or {}
    return _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _amounts(given: Mapping[str, Any]) -> dict[str, int]:
    found = {name: thousandths(amount) for name, amount in given.items()}
    return {name: amount for name, amount in found.items() if amount is not None}


def _add(total: dict[str, int], more: Amounts) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0) + amount


def _term_matches(node: NodeView, term: Object) -> bool:
    expressions = term.get("matchExpressions") or ()
    fields = term.get("matchFields") or ()
    if not expressions and not fields:
        return False  # an empty term selects no node
    name = {"metadata.name": node.name}
    return all(_holds(node.labels, one) for one in expressions) and all(_holds(name, one) for one in fields)


def _holds(labels: Mapping[str, str], expression: Object) -> bool:
    """Whether labels meet one requirement of a node selector term."""
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return _is_less(next(iter(values), None), value)
        case "Lt":
            return _is_less(value, next(iter(values), None))
    return False


def _is_less(one: str | None, other: str | None) -> bool:
    """Whether both are whole numbers, and `one` is the smaller. Kubernetes accepts others, and matches no node."""
    if one is None or other is None or not (_WHOLE.fullmatch(one) and _WHOLE.fullmatch(other)):
        return False
    return int(one) < int(other)


def _tolerates(toleration: Object, taint: Mapping[str, str]) -> bool:
    """Whether this toleration matches the taint. With the operator Exists any value matches, and without a key any
    taint."""
    exists, key = toleration.get("operator") == "Exists", toleration.get("key")
    return (
        toleration.get("effect") in (None, "", taint.get("effect"))
        and (key == taint.get("key") or (exists and not key))
        and (exists or (toleration.get("value") or "") == (taint.get("value") or ""))
    )
