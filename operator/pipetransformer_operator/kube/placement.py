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


def placement_group(job: PipeTrainingJob, worker_id: int) -> str:
    """Name of the workers that had better lie together."""
    plan = job.status.plan
    stages = plan.stages if plan else job.spec.pipeline.stages
    return f"{stages}-{worker_id // stages}"


def affinity(job: PipeTrainingJob, group: str, avoided: Sequence[str] = ()) -> dict[str, Any]:
    """Preferences only: a worker in the wrong place is better than none.

    Whom a worker would lie near may have been on the `avoided` nodes, so to keep off these is then all that is wanted.
    """
    if avoided:
        return {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 100,
                        "preference": {
                            "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [name]}]
                        },
                    }
                    for name in avoided
                ]
            }
        }
    mine = {JOB_LABEL: job.metadata.name, GROUP_LABEL: group}
    others = [{"key": GROUP_LABEL, "operator": "NotIn", "values": [group]}]
    return {
        "podAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                _term(100, HOST, {"matchLabels": mine}),
                _term(50, ZONE, {"matchLabels": mine}),
            ]
        },
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                _term(10, HOST, {"matchLabels": {JOB_LABEL: job.metadata.name}, "matchExpressions": others}),
            ]
        },
    }


def _term(weight: int, key: str, selector: dict[str, Any]) -> dict[str, Any]:
    return {"weight": weight, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
