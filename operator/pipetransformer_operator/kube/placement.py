"""Where workers are wanted, unless the template says it: those of a pipeline together, pipelines apart.

Which worker serves which pipeline is the trainer's choice, made by where the pods came to lie. A pod cannot be moved,
so its group is a guess at its creation: workers of neighbouring ids, as many as a pipeline is long.
"""

from collections.abc import Sequence
from typing import Any

from ..api import GROUP, PipeTrainingJob
from ..plan.accounting import JOB_LABEL

GROUP_LABEL = f"{GROUP}/placement-group"
HOST, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def placement_group(job: PipeTrainingJob, worker_id: int) -> str:
    """Name of the workers that had better lie together."""
    plan = job.status.plan
    stages = plan.stages if plan else job.spec.pipeline.stages
    return f"{stages}-{worker_id // stages}"


def proximity(job: PipeTrainingJob, group: str) -> dict[str, Any]:
    """Kinds of affinity by which a worker lies near its group, and far from the others. Preferences only: a worker in
    the wrong place is better than none."""
    mine = {JOB_LABEL: job.metadata.name, GROUP_LABEL: group}
    others = [{"key": GROUP_LABEL, "operator": "NotIn", "values": [group]}]
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
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]
    return {"weight": 100, "preference": {"matchFields": fields}}


def _term(weight: int, key: str, selector: dict[str, Any]) -> dict[str, Any]:
    return {"weight": weight, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
