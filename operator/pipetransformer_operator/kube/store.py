"""Jobs in the API server (`JobStore`).

Reads come from the watch. A status that was just written is newer than the watch, so it is kept until the watch catches
up. During an upgrade the operator may be older or newer than the CRD. It ignores unknown fields of a spec, because a
newer CRD puts its defaults into every job. It does not start if the CRD lacks fields of the status, because the API
server would drop what the operator stores there.
"""

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

from pydantic import ValidationError

from pipetransformer_contract.api import GROUP, KIND, PLURAL, VERSION, JobStatus, PipeTrainingJob
from pipetransformer_contract.api.requests import Object, jobs_path
from pipetransformer_contract.api.schema import missing_fields, pruned, root_schema
from pipetransformer_operator.clocks import MACHINE, Sources
from pipetransformer_operator.controller.ports import Conflict, JobKey, Unavailable
from pipetransformer_operator.plan import PlanEvent

from .client.api import METADATA_OF_ONE, REQUEST_FAILED, Api, NotFound

logger = logging.getLogger(__name__)
COMPONENT = "pipetransformer-operator"
#: How long the API server may take for an event. The job's turn waits for it.
EVENT_SECONDS = 5.0


class WatchedJobs(Protocol):
    """Jobs as a watch shows them."""

    def of(self, key: JobKey) -> Object | None:
        """The job as the watch last showed it, or None."""
        ...


class ParsedJobs:
    """The newest version of each job, parsed once."""

    def __init__(self) -> None:
        self._newest: dict[JobKey, PipeTrainingJob] = {}

    def parse(self, key: JobKey, body: Object | None) -> PipeTrainingJob | None:
        """The newer of what the watch shows and what is known. Logs a job that does not match the types, and returns
        None for it: a newer CRD may have made it."""
        if body is None:
            self._newest.pop(key, None)
            return None
        known = self._newest.get(key)
        if known is not None and _same(known, body):
            return known
        try:
            self._newest[key] = job = _parse(body)
        except ValidationError as error:
            logger.error("ignoring %s because it does not match this operator's types: %s", key, error)
            return None
        return job

    def note(self, job: PipeTrainingJob) -> None:
        """The job was written: this version is newer than the watch."""
        self._newest[JobKey.of(job)] = job

    def trimmed(self, key: JobKey, body: Mapping[str, Any]) -> Object:
        """The part of a watched job to keep in memory: only its version if that is already parsed here.

        Otherwise it is everything except managedFields, which the operator does not read."""
        metadata, known = body["metadata"], self._newest.get(key)
        if known is not None and _same(known, body):
            return {"metadata": {name: metadata[name] for name in ("uid", "resourceVersion")}}
        return {**body, "metadata": {name: value for name, value in metadata.items() if name != "managedFields"}}


class KubeStore:
    """Reads jobs from memory, and writes their status, their events and their deletion to the API server.

    Args:
        api: client of the API server.
        jobs: jobs as the watch shows them.
        parsed: the newest version of each job that was read or written here.
        sources: clock and names of events.
    """

    def __init__(self, api: Api, jobs: WatchedJobs, parsed: ParsedJobs, sources: Sources = MACHINE) -> None:
        self._api = api
        self._sources = sources
        self._jobs = jobs
        self._parsed = parsed

    def read(self, key: JobKey) -> PipeTrainingJob | None:
        """See `JobStore`."""
        return self._parsed.parse(key, self._jobs.of(key))

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """See `JobStore`.

        The API server takes exactly this status for exactly this version of the job, or refuses it. So the answer
        needs no status, and parsing it would take longer than writing it.
        """
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
            written = await self._api.request("PUT", f"{_path(job)}/status", body, accept=METADATA_OF_ONE)
        except NotFound as error:
            raise Conflict(str(error)) from error
        metadata = job.metadata.model_copy(update={"resource_version": written["metadata"]["resourceVersion"]})
        self._parsed.note(job.model_copy(update={"metadata": metadata, "status": status}))

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
            body = _event(job, event, self._sources.now(), self._sources.token(8))
            await self._api.request("POST", path, body, timeout=EVENT_SECONDS)
        except REQUEST_FAILED as error:
            logger.warning("cannot write event %s: %s (%s)", event.reason.value, event.message, error)


async def why_not_served(api: Api) -> str:
    """Why this operator cannot serve jobs now. Empty if the API server answers, and its CRD has the whole status."""
    try:
        group = await api.get(f"/apis/{GROUP}/{VERSION}")
        schemas = (await api.get(f"/openapi/v3/apis/{GROUP}/{VERSION}"))["components"]["schemas"]
    except (NotFound, Unavailable) as error:
        return f"the cluster does not serve {PLURAL}: {error}"
    theirs = next((schema for name, schema in schemas.items() if name.endswith(f".{KIND}")), None)
    if theirs is None or PLURAL not in {resource["name"] for resource in group["resources"]}:
        return f"the cluster does not serve {PLURAL} of {GROUP}/{VERSION}: apply the CRD"
    missing = missing_fields(root_schema()["properties"]["status"], theirs["properties"].get("status", {}), "status")
    if missing:
        lacks = ", ".join(missing)
        return f"the CRD of {PLURAL} is older than this operator and lacks {lacks}: apply the newer one"
    return ""


def _same(known: PipeTrainingJob, body: Mapping[str, Any]) -> bool:
    """Whether what is known of the object is at least as new as what the watch shows: versions grow (KEP-5504)."""
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
        logger.warning("%s: ignoring fields that this operator does not know: %s", body["metadata"]["name"], fields)
        return PipeTrainingJob.from_manifest(pruned(root_schema(), body) | {"metadata": body["metadata"]})


def _path(job: PipeTrainingJob) -> str:
    return f"{jobs_path(job.metadata.namespace)}/{job.metadata.name}"


def _event(job: PipeTrainingJob, event: PlanEvent, time: datetime, token: str) -> dict[str, Any]:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.metadata.name}.{token}", "namespace": job.metadata.namespace},
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
