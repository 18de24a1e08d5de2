"""What keeps others off a job's workers: a NetworkPolicy and a PodDisruptionBudget, one of each a job.

Both belong to the job and vanish with it. They may change, so they are kept by server-side apply; an object that is as
it was last applied costs no request.
"""

from ..api import PipeTrainingJob
from ..controller.ports import JobKey
from ..plan.accounting import JOB_LABEL
from .api import APPLY_PATCH, Api, Object
from .rendering import METRICS_PORT, owner_reference


class Protection:
    """See the module.

    Args:
        api: of the cluster.
        scraper: namespace whose pods may read the workers' metrics; empty for none.
    """

    def __init__(self, api: Api, scraper: str = "") -> None:
        self._api = api
        self._scraper = scraper
        self._applied: dict[JobKey, dict[str, tuple[Object, int]]] = {}

    async def apply(self, job: PipeTrainingJob, min_available: int | None) -> None:
        """Makes both objects as they should be; None: the budget is not touched.

        Raises:
            Refused: the cluster does not take them; the message says why.
            Unavailable: not now.
        """
        applied = self._applied.setdefault(JobKey(job.metadata.namespace, job.metadata.name), {})
        wanted = {"/apis/networking.k8s.io/v1": network_policy(job, self._scraper)}
        if min_available is not None:
            wanted["/apis/policy/v1"] = disruption_budget(job, min_available)
        for folder, body in wanted.items():
            if folder in applied and applied[folder][0] == body:
                continue
            kind = {"NetworkPolicy": "networkpolicies", "PodDisruptionBudget": "poddisruptionbudgets"}[body["kind"]]
            path = f"{folder}/namespaces/{job.metadata.namespace}/{kind}/{body['metadata']['name']}"
            answer = await self._api.request("PATCH", path, body, content_type=APPLY_PATCH)
            applied[folder] = body, answer["metadata"]["generation"]

    def forget_if_touched(self, key: JobKey, one: Object, *, deleted: bool) -> bool:
        """Whether somebody else deleted or changed what a watch shows; then the job's next turn applies it."""
        applied, folder = self._applied.get(key, {}), f"/apis/{one['apiVersion']}"
        if folder not in applied:
            return False
        body, generation = applied[folder]
        metadata = one["metadata"]
        touched = deleted or metadata["generation"] > generation
        if metadata["name"] != body["metadata"]["name"] or not touched:
            return False
        del applied[folder]
        return True

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._applied.pop(key, None)

    def forget_all(self) -> None:
        """Nobody knows what others did: everything is applied again."""
        self._applied.clear()


def network_policy(job: PipeTrainingJob, scraper: str) -> Object:
    """Lets only the job's own pods connect to its workers, and Prometheus to their metrics; the user may allow more by
    another policy."""
    own = {"matchLabels": {JOB_LABEL: job.metadata.name}}
    ingress: list[Object] = [{"from": [{"podSelector": own}]}]
    if scraper:
        namespace = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": scraper}}}
        ingress.append({"from": [namespace], "ports": [{"port": METRICS_PORT, "protocol": "TCP"}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job),
        "spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def disruption_budget(job: PipeTrainingJob, min_available: int) -> Object:
    """Lets evictions pass as long as `min_available` workers stay.

    It is a number and no share: for a share, or `maxUnavailable`, the cluster would multiply by the job's scale, a
    ceiling.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(job),
        "spec": {
            "selector": {"matchLabels": {JOB_LABEL: job.metadata.name}},
            "minAvailable": min_available,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _metadata(job: PipeTrainingJob) -> Object:
    return {
        "name": f"{job.metadata.name}-workers",
        "namespace": job.metadata.namespace,
        "labels": {JOB_LABEL: job.metadata.name, "app.kubernetes.io/managed-by": "pipetransformer-operator"},
        "ownerReferences": [owner_reference(job)],
    }
