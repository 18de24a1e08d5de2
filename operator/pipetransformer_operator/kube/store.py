"""Jobs in the API server (`JobStore`).

Reads come from the watch; a status that was just written is newer than the watch, so it is kept until the watch
has caught up.

While the operator is upgraded it may be older or newer than the CRD. Fields of a spec that it does not know are as if
they were not there: a newer CRD puts its defaults into every job. A CRD that lacks fields of the status would lose what
the operator remembers, so under such a one it does not start.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from pipetransformer_contract.api import GROUP, KIND, PLURAL, VERSION, JobStatus, PipeTrainingJob
from pipetransformer_contract.api.requests import jobs_path as jobs_path  # `as`: `kueue` imports it from here
from pipetransformer_contract.api.schema import missing_fields, pruned, root_schema
from pipetransformer_operator.controller.ports import Conflict, JobKey, Unavailable
from pipetransformer_operator.plan import PlanEvent

from .client.api import Api, NotFound, Object

logger = logging.getLogger(__name__)
COMPONENT = "pipetransformer-operator"


class KubeStore:
    """See the module.

    Args:
        api: of the cluster.
        watched: the job as the watch last showed it, or None.
    """

    def __init__(self, api: Api, watched: Callable[[JobKey], Object | None]) -> None:
        self._api = api
        self._watched = watched
        self._newest: dict[JobKey, PipeTrainingJob] = {}

    def read(self, key: JobKey) -> PipeTrainingJob | None:
        """See `JobStore`. A job that does not fit the types (of a newer CRD, say) is logged and not touched."""
        body = self._watched(key)
        if body is None:
            self._newest.pop(key, None)
            return None
        known = self._newest.get(key)
        if known is not None and _same(known, body):
            return known
        try:
            self._newest[key] = job = _parse(body)
        except ValidationError as error:
            logger.error("%s is not touched, for it does not fit the types: %s", key, error)
            return None
        return job

    def kept(self, key: JobKey, body: Mapping[str, Any]) -> Object:
        """What is to be kept of a job that the watch shows: its version alone where that is known here already, as what
        was written is; else all but managedFields, which nobody reads."""
        metadata, known = body["metadata"], self._newest.get(key)
        if known is not None and _same(known, body):
            return {"metadata": {name: metadata[name] for name in ("uid", "resourceVersion")}}
        return {**body, "metadata": {name: value for name, value in metadata.items() if name != "managedFields"}}

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """See `JobStore`."""
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {
                "name": job.metadata.name,
                "namespace": job.metadata.namespace,
                "uid": job.metadata.uid,
                "resourceVersion": job.metadata.resource_version,
            },
            "status": status.to_wire(),
        }
        try:
            written = await self._api.request("PUT", f"{_path(job)}/status", body)
        except NotFound as error:
            raise Conflict(str(error)) from error
        self._newest[JobKey(job.metadata.namespace, job.metadata.name)] = _parse(written)

    async def delete(self, job: PipeTrainingJob) -> None:
        """See `JobStore`."""
        body = {"preconditions": {"uid": job.metadata.uid}, "propagationPolicy": "Background"}
        try:
            await self._api.request("DELETE", _path(job), body)
        except NotFound:
            return

    async def tell(self, job: PipeTrainingJob, event: PlanEvent) -> None:
        """See `JobStore`."""
        try:
            path = f"/api/v1/namespaces/{job.metadata.namespace}/events"
            await self._api.request("POST", path, _event(job, event))
        except (Unavailable, Conflict, NotFound) as error:
            logger.warning("event lost: %s: %s (%s)", event.reason.value, event.message, error)


async def served(api: Api) -> bool:
    """Whether the API server answers now, and knows our jobs with all that is to be remembered about them."""
    try:
        group = await api.get(f"/apis/{GROUP}/{VERSION}")
        schemas = (await api.get(f"/openapi/v3/apis/{GROUP}/{VERSION}"))["components"]["schemas"]
    except (NotFound, Unavailable):
        return False
    served = next((schema for name, schema in schemas.items() if name.endswith(f".{KIND}")), None)
    if served is None or PLURAL not in {resource["name"] for resource in group["resources"]}:
        return False
    missing = missing_fields(root_schema()["properties"]["status"], served["properties"].get("status", {}), "status")
    if missing:
        logger.error(
            "the CRD of %s is older than this operator, apply the newer one: no %s", PLURAL, ", ".join(missing)
        )
    return not missing


def _same(known: PipeTrainingJob, body: Mapping[str, Any]) -> bool:
    """Whether the watch shows nothing newer than what is known of the same object: versions grow (KEP-5504)."""
    metadata = body["metadata"]
    same = known.metadata.uid == metadata["uid"]
    return same and int(known.metadata.resource_version) >= int(metadata["resourceVersion"])


def _parse(body: Object) -> PipeTrainingJob:
    try:
        return PipeTrainingJob.from_manifest(body)
    except ValidationError as error:
        if any(detail["type"] != "extra_forbidden" for detail in error.errors()):
            raise
        fields = ", ".join(".".join(map(str, detail["loc"])) for detail in error.errors())
        logger.warning("%s: not known to this operator: %s", body["metadata"]["name"], fields)
        return PipeTrainingJob.from_manifest(pruned(root_schema(), body) | {"metadata": body["metadata"]})


def _path(job: PipeTrainingJob) -> str:
    return f"{jobs_path(job.metadata.namespace)}/{job.metadata.name}"


def _event(job: PipeTrainingJob, event: PlanEvent) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.metadata.name}.{secrets.token_hex(8)}", "namespace": job.metadata.namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": job.metadata.name,
            "namespace": job.metadata.namespace,
            "uid": job.metadata.uid,
            "resourceVersion": job.metadata.resource_version,
        },
        "reason": event.reason.value,
        "message": event.message[:1024],
        "type": event.type.value,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
