"""Where workers are wanted, unless the template says it: those of a pipeline together, pipelines apart.

Which worker serves which pipeline is the trainer's choice, made by where the pods came to lie. A pod cannot be moved,
so its group is a guess at its creation: a place that somebody left, else a new group of as many as a pipeline is long.
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
    """Names of the workers that had better lie together, for workers that are created one after the other.

    Args:
        stages: the length of a pipeline now.
        longest: that it ever has. A group keeps the length that a pipeline had when it was begun: whoever takes a place
            in it goes where the one before was.
        taken: groups of the workers that stay, a name each.
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
    """By the label of a pod, which others may have changed."""
    length = group.partition("-")[0]
    return int(length) if length.isascii() and length.isdecimal() and len(length) < 5 else 0


def proximity(job: PipeTrainingJob, group: str) -> dict[str, Any]:
    """Kinds of affinity by which a worker lies near its group, and far from the others. Preferences only: a worker in
    the wrong place is better than none."""
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
    """A preference of node affinity for any node but these."""
    return {"weight": 100, "preference": {"matchFields": none_of(nodes)}}


def none_of(nodes: Sequence[str]) -> list[dict[str, Any]]:
    """What a node has to be to be none of these: a field of a selector takes one name."""
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]


def _term(weight: int, key: str, selector: dict[str, Any]) -> dict[str, Any]:
    return {"weight": weight, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
