"""Where workers should run, unless the template says so: workers of a pipeline close together, pipelines apart.

The trainer decides which worker serves which pipeline, after the pods have nodes. A pod cannot be moved, so its group
is a guess at its creation: a free place in a group, otherwise a new group with as many places as a pipeline has stages.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.labels import JOB_LABEL, PLACEMENT_GROUP_LABEL

HOST, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
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
        self._sizes = Counter(taken)
        self._number = 0
        self._places = [
            group for group, size in sorted(self._sizes.items()) for _ in range(min(_length(group), longest) - size)
        ]

    def join(self) -> str:
        """The group of the next worker."""
        if not self._places:
            while (group := f"{self._stages}-{self._number}") in self._sizes:
                self._number += 1
            self._number += 1
            self._places = [group] * self._stages
        return self._places.pop(0)


def _length(group: str) -> int:
    """Length of a group according to its label; 0 if another client changed the label to something else."""
    length = group.partition("-")[0]
    return int(length) if length.isascii() and length.isdecimal() and len(length) < 5 else 0


def proximity(job: PipeTrainingJob, group: str) -> dict[str, Any]:
    """Affinity that puts a worker near its group and far from other groups. These are preferences only, because a
    worker in the wrong place is better than none."""
    mine = {JOB_LABEL: job.metadata.name, PLACEMENT_GROUP_LABEL: group}
    others = [{"key": PLACEMENT_GROUP_LABEL, "operator": "NotIn", "values": [group]}]
    return {
        "podAffinity": {
            PREFERRED: [
                _term(100, HOST, {"matchLabels": mine}),
                _term(50, ZONE, {"matchLabels": mine}),
            ]
        },
        "podAntiAffinity": {
            PREFERRED: [
                _term(10, HOST, {"matchLabels": {JOB_LABEL: job.metadata.name}, "matchExpressions": others}),
            ]
        },
    }


def off(nodes: Sequence[str]) -> dict[str, Any]:
    """A preference for nodes other than these."""
    return {"weight": 100, "preference": {"matchFields": none_of(nodes)}}


def none_of(nodes: Sequence[str]) -> list[dict[str, Any]]:
    """Requirements that exclude each of these nodes, one each: a field selector takes only one name."""
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]


def _term(weight: int, key: str, selector: dict[str, Any]) -> dict[str, Any]:
    return {"weight": weight, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
