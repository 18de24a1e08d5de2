"""Where workers should run, unless the template says so: workers of a pipeline close together, pipelines apart.

The trainer decides which worker serves which pipeline, after the pods have nodes. A pod cannot be moved, so its group
is a guess at its creation. It gets a free place in a group, otherwise a new group with a place for each stage.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.job import Topology
from pipetransformer_contract.api.labels import JOB_LABEL, PLACEMENT_GROUP_LABEL

HOST, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
NEAR, FAR = "podAffinity", "podAntiAffinity"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


class Groups:
    """Deals groups to workers that are created one after the other.

    Args:
        stages: length of a pipeline now.
        longest: the greatest length of a pipeline. A group keeps the length that pipelines had when it began, so a
            replacement goes where the worker before it was.
        taken: the group of each worker that stays.
    """

    def __init__(self, stages: int, longest: int, taken: Iterable[str]) -> None:
        self._stages = stages
        self._joined: dict[int, str] = {}
        self._sizes = Counter(taken)
        self._number = 0
        self._places = [
            group for group, size in sorted(self._sizes.items()) for _ in range(min(_length(group), longest) - size)
        ]

    def of(self, worker_id: int) -> str:
        """The group of a new worker."""
        if worker_id not in self._joined:
            self._joined[worker_id] = self._join()
        return self._joined[worker_id]

    def is_alone(self, group: str) -> bool:
        """Whether all workers of the job are in this group now."""
        return not {*self._sizes, *self._joined.values()} - {group}

    def _join(self) -> str:
        if not self._places:
            while (group := f"{self._stages}-{self._number}") in self._sizes:
                self._number += 1
            self._number += 1
            self._places = [group] * self._stages
        return self._places.pop(0)


def _length(group: str) -> int:
    """Length of a group according to its label; 0 if another client changed the label to something else."""
    length = group.partition("-")[0]
    return int(length) if length.isdecimal() else 0


def choose_domains(sizes: Mapping[str, int], room: Mapping[str, int], *, apart: bool) -> dict[str, str]:
    """The domain, such as a rack, where each new group should begin.

    The scheduler looks for a node for one pod, not for a group. So the first pod of a group could take the last place
    of a domain, and the others would wait to be near it.

    Args:
        sizes: number of workers of each group.
        room: how many more workers find nodes in each domain.
        apart: whether no two groups may share a domain.

    Returns:
        By group the domain with most room, because other pods may take some of it meanwhile. Without groups that have
        room in no domain.
    """
    left, found = dict(room), {}
    for group, size in sizes.items():
        domain = max(left, key=lambda one: (left[one], one), default="")
        if left.get(domain, 0) < size:
            continue
        found[group] = domain
        left[domain] -= size
        if apart:
            del left[domain]
    return found


class Wish(NamedTuple):
    """Where a pod should run, seen from other pods of its job.

    Attributes:
        kind: `podAffinity` or `podAntiAffinity`.
        term: the pods, and the label of nodes that says what is near.
        weight: against other preferences.
        asked: whether `spec.placement` asks for it. Otherwise it is the operator's default.
        required: whether the pod waits until a node fulfils it.
    """

    kind: str
    term: dict[str, Any]
    weight: int = 0
    asked: bool = False
    required: bool = False

    @property
    def rule(self) -> str:
        """The field of an affinity that it belongs to."""
        return REQUIRED if self.required else PREFERRED

    @property
    def entry(self) -> dict[str, Any]:
        """The entry of that field's list."""
        return self.term if self.required else {"weight": self.weight, "podAffinityTerm": self.term}


def wishes(job: PipeTrainingJob, group: str, *, alone: bool) -> list[Wish]:
    """Where a worker should run: near its group, and far from other groups of its job.

    The group that is alone keeps no distance by default, because later groups keep theirs. The scheduler compares each
    term of each pod with each new pod, so every term counts when thousands of pods start."""
    mine = {"matchLabels": {JOB_LABEL: job.metadata.name, PLACEMENT_GROUP_LABEL: group}}
    others = {
        "matchLabels": {JOB_LABEL: job.metadata.name},
        "matchExpressions": [{"key": PLACEMENT_GROUP_LABEL, "operator": "NotIn", "values": [group]}],
    }
    within, spread = job.spec.placement.within, job.spec.placement.spread
    near = [
        Wish(NEAR, _term(HOST, mine), 100),
        _wish(within, NEAR, mine, 50) or Wish(NEAR, _term(ZONE, mine), 50),
    ]
    far = _wish(spread, FAR, others, 10) or Wish(FAR, _term(HOST, others), 10)
    return near if alone and not far.asked else [*near, far]


def _wish(topology: Topology | None, kind: str, pods: dict[str, Any], weight: int) -> Wish | None:
    if topology is None:
        return None
    return Wish(kind, _term(topology.topology_key, pods), weight, asked=True, required=topology.required)


def prefer_other_nodes(nodes: Sequence[str]) -> dict[str, Any]:
    """A preference for nodes other than these."""
    return {"weight": 100, "preference": {"matchFields": exclude_nodes(nodes)}}


def prefer_nodes_with(label: str, value: str) -> dict[str, Any]:
    """A preference for nodes with this label."""
    return {"weight": 100, "preference": {"matchExpressions": [{"key": label, "operator": "In", "values": [value]}]}}


def exclude_nodes(nodes: Sequence[str]) -> list[dict[str, Any]]:
    """Requirements that exclude each of these nodes, one each: a field selector takes only one name."""
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]


def _term(key: str, selector: dict[str, Any]) -> dict[str, Any]:
    return {"topologyKey": key, "labelSelector": selector}
