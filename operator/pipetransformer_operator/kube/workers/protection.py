"""Protects a job's workers: one NetworkPolicy and one PodDisruptionBudget for each job.

Kubernetes deletes both with the job. The operator deletes the budgets when it stops, because only the operator replaces
workers of a drained node: without it, budgets would block drains forever. Both objects may change, so they are written
by server-side apply, each by its UID: by name alone it would take over another owner's object. An unchanged object
costs no request.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.labels import CLAIMED_LABEL, JOB_LABEL, MANAGED_BY, NAMESPACE_LABEL
from pipetransformer_contract.api.requests import APPLY_PATCH, Object
from pipetransformer_operator.controller.ports import Conflict, JobKey, Refused, Unavailable
from pipetransformer_operator.kube.client.api import Api, NotFound
from pipetransformer_operator.plan import DisruptionBudget

from .pods import controller_uid, is_owned_by_name
from .rendering import METRICS_PORT, owner_reference

#: By kind, how a path names its objects. The part of the path before the namespace is its API path.
_KINDS = {"NetworkPolicy": "networkpolicies", "PodDisruptionBudget": "poddisruptionbudgets"}


class _Applied(NamedTuple):
    body: Object
    uid: str
    generation: int


class Protection:
    """Writes what protects the workers of each job, and remembers what it wrote.

    Args:
        api: client of the API server.
        scraper: namespace whose pods may read the workers' metrics; empty for none.
    """

    def __init__(self, api: Api, scraper: str = "") -> None:
        self._api = api
        self._scraper = scraper
        self._applied: dict[JobKey, dict[str, _Applied]] = {}
        #: What watches show of an object while it is being written: another client may have changed it since.
        self._shown: dict[tuple[JobKey, str], list[tuple[Object, bool]]] = {}

    async def apply(self, job: PipeTrainingJob, budget: DisruptionBudget | None) -> None:
        """Creates or updates both objects. If `budget` is None, the present one stays.

        Raises:
            Conflict: one changed meanwhile, or the namespace is gone.
            Refused: the cluster refuses them, or an object of another owner has the name; the message says which.
            Unavailable: they cannot be written now.
        """
        key = JobKey.of(job)
        applied = self._applied.setdefault(key, {})
        wanted = {"/apis/networking.k8s.io/v1": network_policy(job, self._scraper)}
        if budget is not None:
            wanted["/apis/policy/v1"] = disruption_budget(job, budget)
        refused: Refused | None = None
        for api_path, body in wanted.items():
            known = applied.get(api_path)
            if known and known.body == body:
                continue
            path = f"{api_path}/namespaces/{job.metadata.namespace}/{_KINDS[body['kind']]}"
            shown = self._shown[key, api_path] = []
            try:
                metadata = (await self._write(job, path, body, known))["metadata"]
            except NotFound as error:
                raise Conflict(str(error)) from error
            except Refused as error:
                refused = error
                continue
            finally:
                del self._shown[key, api_path]
                applied.pop(api_path, None)  # if the answer was lost, the object is unknown
            applied[api_path] = _Applied(body, metadata["uid"], metadata["generation"])
            if any(self.forget_if_touched(key, api_path, one, deleted=deleted) for one, deleted in shown):
                raise Unavailable(f"another client changed {body['kind']} {body['metadata']['name']} meanwhile")
        if refused:
            raise refused

    async def _write(self, job: PipeTrainingJob, path: str, body: Object, known: _Applied | None) -> Object:
        """Writes the job's own object, never another owner's object of the same name."""
        if known:
            with suppress(Conflict, NotFound):  # it was deleted, and a new object may have its name
                return await self._patch(path, body, known.uid)
        try:
            return await self._api.request("POST", path, body)
        except (Conflict, Refused) as error:  # a full quota also refuses to create an object that exists
            try:
                seen = await self._api.get(f"{path}/{body['metadata']['name']}")
            except (NotFound, Refused):
                raise error from None
        if controller_uid(seen) == job.metadata.uid:
            same = seen["spec"] == body["spec"] and _has_labels(seen["metadata"], body)
            return seen if same else await self._patch(path, body, seen["metadata"]["uid"])
        name = f"{body['kind']} {body['metadata']['name']}"
        if is_owned_by_name(seen, job):
            raise Unavailable(f"{name} of a deleted job of the same name still exists")
        raise Refused(f"{name} exists and belongs to another owner: delete or rename it or the job")

    async def _patch(self, path: str, body: Object, uid: str) -> Object:
        body = {**body, "metadata": {**body["metadata"], "uid": uid}}
        return await self._api.request("PATCH", f"{path}/{body['metadata']['name']}", body, content_type=APPLY_PATCH)

    def written(self, api_path: str, namespace: str) -> list[Object]:
        """Objects of the API path as last applied, in the namespace; in all when it is empty."""
        jobs = [of_job for key, of_job in self._applied.items() if namespace in ("", key.namespace)]
        return [of_job[api_path].body for of_job in jobs if api_path in of_job]

    def forget_if_touched(self, key: JobKey, api_path: str, metadata: Object, *, deleted: bool) -> bool:
        """Whether another client deleted or changed the object. Then the job's next turn applies it again."""
        if (key, api_path) in self._shown:
            self._shown[key, api_path].append((metadata, deleted))
            return False
        known = self._applied.get(key, {}).get(api_path)
        if known is None or metadata["name"] != known.body["metadata"]["name"]:
            return False
        if deleted and metadata.get("uid", known.uid) != known.uid:
            return False  # an earlier object of this name
        if (
            not deleted
            and metadata["uid"] == known.uid
            and metadata["generation"] <= known.generation
            and _has_labels(metadata, known.body)
        ):
            return False
        del self._applied[key][api_path]
        return True

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._applied.pop(key, None)


async def release_budgets(api: Api, namespaces: Sequence[str]) -> None:
    """Deletes the budgets of all jobs, so that nodes can be drained while no operator runs.

    Args:
        api: client of the API server.
        namespaces: names of the namespaces to look at; all when empty.

    Raises:
        Refused, Unavailable: some could not be deleted. All others are.
    """
    places = [f"/namespaces/{name}" for name in namespaces] or [""]
    errors = await _errors_of(_release(api, f"/apis/policy/v1{place}/poddisruptionbudgets") for place in places)
    if errors:
        raise errors[0]


async def _release(api: Api, path: str) -> None:
    query = {"labelSelector": ",".join((JOB_LABEL, *(f"{key}={value}" for key, value in MANAGED_BY.items())))}
    errors: list[BaseException] = []
    async for part in api.list(path, query):
        errors += await _errors_of(_delete(api, budget["metadata"]) for budget in part["items"])
    if errors:
        raise errors[0]


async def _errors_of(calls: Iterable[Coroutine[Any, Any, None]]) -> list[BaseException]:
    """Carries out all calls, also if some fail, and returns what they raised."""
    return [error for error in await asyncio.gather(*calls, return_exceptions=True) if error is not None]


async def _delete(api: Api, metadata: Object) -> None:
    path = f"/apis/policy/v1/namespaces/{metadata['namespace']}/poddisruptionbudgets/{metadata['name']}"
    with suppress(NotFound, Conflict):
        await api.request("DELETE", path, {"preconditions": {"uid": metadata["uid"]}})


def network_policy(job: PipeTrainingJob, scraper: str) -> Object:
    """Allows only the job's own pods to connect to its workers, and Prometheus to their metrics. Users can allow more
    by another policy."""
    own = {"matchLabels": {JOB_LABEL: job.metadata.name}}
    ingress: list[Object] = [{"from": [{"podSelector": own}]}]
    if scraper:
        namespace = {"namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: scraper}}}
        ingress.append({"from": [namespace], "ports": [{"port": METRICS_PORT, "protocol": "TCP"}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job),
        "spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def disruption_budget(job: PipeTrainingJob, budget: DisruptionBudget) -> Object:
    """Allows evictions as long as `min_available` of the covered workers stay.

    `min_available` is a number of pods. The cluster would take a percentage, or `maxUnavailable`, of the job's scale,
    which is a maximum. A pod that runs but is not ready is evicted at once with AlwaysAllow. With IfHealthyBudget it
    stays while too few are ready, which may never end. Pods that do not run are always evicted.
    """
    covered = {JOB_LABEL: job.metadata.name, **({} if budget.claimed else {CLAIMED_LABEL: "false"})}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(job),
        "spec": {
            "selector": {"matchLabels": covered},
            "minAvailable": budget.min_available,
            "unhealthyPodEvictionPolicy": "IfHealthyBudget" if budget.unready else "AlwaysAllow",
        },
    }


def _has_labels(metadata: Object, body: Object) -> bool:
    """Whether an object has the labels that it was written with. A change of labels leaves its generation as it is."""
    there: Object = metadata.get("labels", {})
    wanted: Object = body["metadata"]["labels"]
    return wanted.items() <= there.items()


def _metadata(job: PipeTrainingJob) -> Object:
    return {
        "name": f"{job.metadata.name}-workers",
        "namespace": job.metadata.namespace,
        "labels": {JOB_LABEL: job.metadata.name, **MANAGED_BY},
        "ownerReferences": [owner_reference(job)],
    }
