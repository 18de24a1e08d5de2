"""Kueue as the quota of jobs.

Every turn makes the Workloads match the status, so an extra turn costs nothing. When a job is deleted, our finalizer
keeps its Workloads until its pods are gone.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.labels import JOB_LABEL, PRIORITY_CLASS_LABEL, QUEUE_LABEL
from pipetransformer_contract.api.requests import APPLY_PATCH, MERGE_PATCH, Object, jobs_path
from pipetransformer_contract.api.status import QuotaRequest
from pipetransformer_operator.clocks import Clock, utc_now
from pipetransformer_operator.controller.ports import Conflict, JobKey, Refused, Unavailable
from pipetransformer_operator.kube.client.api import REQUEST_FAILED, Api, NotFound
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.workers.pods import controller_uid
from pipetransformer_operator.kube.workers.rendering import ANYWHERE, Assignment
from pipetransformer_operator.plan import Answer, Queue

from . import workload as workloads
from .watch import QUERY, TIMEOUT_SECONDS, Workloads

logger = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
ABANDONED_SECONDS = 60.0
_ENDED = ("Succeeded", "Failed")


class KueueQuota(ClusterListener):
    """A `Quota` that asks Kueue for what a job's status says, and returns what the status no longer says.

    Args:
        api: client of the API server.
        namespaces: names of the namespaces that this operator serves; all when empty.
        events: is told whose Workload changed.
        clock: the present time, with its time zone.
    """

    def __init__(self, api: Api, namespaces: Iterable[str], events: ClusterListener, clock: Clock = utc_now) -> None:
        self._api = api
        self._clock = clock
        self._seen = Workloads(api, namespaces, events)
        self._refusals: dict[JobKey, str] = {}
        self._flavors: dict[str, tuple[tuple[str, ...], list[Object]]] = {}

    @property
    def answers(self) -> bool | None:
        """Whether Kueue answered the newest request of the watch; None before the first."""
        return self._seen.answers

    def observe(self, job: PipeTrainingJob) -> Queue | None:
        """See `Quota`."""
        if not job.metadata.labels.get(QUEUE_LABEL) and not job.status.quota_requests:
            return None
        answers = {name: workloads.answer(one) for name, one in self._mine(job).items()}
        if refusal := self._refusals.get(JobKey.of(job)):
            waiting = (one.name for one in job.status.quota_requests if not one.admitted)
            answers |= {name: replace(answers.get(name, Answer(False)), message=refusal) for name in waiting}
        return Queue(self._seen.problem(job.metadata.namespace), answers)

    async def apply(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """See `Quota`."""
        if self._seen.problem(job.metadata.namespace):
            return
        self._refusals.pop(JobKey.of(job), None)
        mine, now = self._mine(job), self._clock()
        wanted = {request.name for request in status.quota_requests}
        for request in status.quota_requests:
            seen = mine.get(request.name)
            if seen is None:
                if not request.admitted:
                    await self._ask(job, request, claimed=request not in status.own_requests)
            elif workloads.is_ending(seen):
                continue
            elif not request.admitted and request in status.quota_requests[:1] and workloads.has_old_class(seen, job):
                with self._noting_refusals(job):  # without the new class it keeps its place in the queue
                    await self._class_value(job)
                await self._release(seen)  # its priority cannot change, so the next turn asks again
            elif workloads.is_evicted(seen) and not request.admitted:
                await self._patch(seen, workloads.requeued(seen, request, now), MERGE_PATCH)
            elif body := workloads.usage(seen, request, status.generation, now):
                await self._patch(seen, body, APPLY_PATCH)
        for name, seen in mine.items():
            if name not in wanted:
                await self._release(seen)

    async def assigned(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> Assignment:
        """What the worker's pod must carry, according to the quota that it uses.

        Raises:
            Refused: Kueue does not answer now, and the answer is not cached.
        """
        request = next((one for one in status.quota_requests if worker_id in one.worker_ids), None)
        if request is None:
            return ANYWHERE
        seen = self._mine(job).get(request.name)
        names = workloads.flavors(seen) if seen else None
        if seen is None or names is None:
            raise Refused(f"cannot read Workload {request.name} now, which says which nodes its pods need")
        known, admission = self._flavors.get(seen["metadata"]["uid"]), (*names, workloads.reserved_at(seen))
        if known is None or known[0] != admission:
            try:
                found = [await self._get(f"resourceflavors/{name}") for name in names]
            except (NotFound, Unavailable) as error:
                raise Refused(f"ResourceFlavors of Workload {request.name}: {error}") from error
            known = self._flavors[seen["metadata"]["uid"]] = admission, found
        return workloads.assignment(seen, known[1])

    def on_job_gone(self, key: JobKey) -> None:
        """See `ClusterListener`."""
        self._refusals.pop(key, None)

    async def run(self) -> None:
        """Watches until it is cancelled, and releases Workloads once their job and its pods are gone."""
        await asyncio.gather(self._seen.run(), self._release_orphans())

    async def _release_orphans(self) -> None:
        kept: set[str] = set()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            said, kept = kept, set()
            for key, seen in self._seen.all():
                if not workloads.is_ending(seen):
                    continue
                try:
                    if not await self._is_needed(key, controller_uid(seen)):
                        await self._release(seen)
                except REQUEST_FAILED as error:
                    kept.add(uid := seen["metadata"]["uid"])
                    if uid not in said:  # once for each, because Kueue may be away for hours
                        logger.warning("cannot release Workload %s now: %s", seen["metadata"]["name"], error)

    async def _is_needed(self, key: JobKey, owner: str) -> bool:
        """Whether the job exists, or one of its pods may still hold a device. Asks the API server: memory may lag."""
        try:
            job = await self._api.get(f"{jobs_path(key.namespace)}/{key.name}")
            if job["metadata"]["uid"] == owner and "deletionTimestamp" not in job["metadata"]:
                return True
        except NotFound:
            pass
        path = f"/api/v1/namespaces/{key.namespace}/pods"
        async for part in self._api.list(path, {"labelSelector": f"{JOB_LABEL}={key.name}"}):  # there may be thousands
            mine = (pod for pod in part["items"] if controller_uid(pod) == owner)
            if any(pod.get("status", {}).get("phase") not in _ENDED for pod in mine):
                return True
        return False

    async def _ask(self, job: PipeTrainingJob, request: QuotaRequest, *, claimed: bool) -> None:
        with self._noting_refusals(job):
            value = await self._class_value(job)
            body = workloads.render(job, request, claimed=claimed, class_value=value)
            collection = _path(job.metadata.namespace)
            try:
                made = await self._api.request("POST", collection, body, timeout=TIMEOUT_SECONDS)
            except Conflict:
                made = await self._api.get(f"{collection}/{request.name}", timeout=TIMEOUT_SECONDS)
                if controller_uid(made) != job.metadata.uid:
                    raise Refused(f"Workload {request.name} exists and belongs to another owner") from None
        self._seen.note(made)

    @contextmanager
    def _noting_refusals(self, job: PipeTrainingJob) -> Iterator[None]:
        """Keeps the words of a refusal, so that the job's status says them.

        Raises:
            Refused: Kueue, or the API server in its place, refused.
        """
        try:
            yield
        except (NotFound, Refused) as error:
            self._refusals[JobKey.of(job)] = str(error)
            raise Refused(str(error)) from error

    async def _class_value(self, job: PipeTrainingJob) -> int | None:
        name = job.metadata.labels.get(PRIORITY_CLASS_LABEL)
        if not name:
            return None
        try:
            return int((await self._get(f"workloadpriorityclasses/{name}"))["value"])
        except NotFound:
            label = f"metadata.labels[{PRIORITY_CLASS_LABEL}]"
            raise Refused(f"{label}: WorkloadPriorityClass {name} does not exist") from None

    async def _release(self, seen: Object) -> None:
        """Deletes a Workload and drops our finalizer, so that Kueue frees its quota."""
        metadata = seen["metadata"]
        if not workloads.is_ending(seen):
            path = f"{_path(metadata['namespace'])}/{metadata['name']}"
            body = {"preconditions": {"uid": metadata["uid"]}}
            with suppress(NotFound):
                answer = await self._api.request("DELETE", path, body, timeout=TIMEOUT_SECONDS)
                if answer["kind"] == "Workload":  # otherwise no finalizer kept it, and it is gone
                    seen = answer
        others = await _drop_finalizer(self._api, seen)
        self._flavors.pop(metadata["uid"], None)
        if not others:
            self._seen.drop(seen)

    async def _patch(self, seen: Object, body: Object, content_type: str) -> None:
        path = f"{_path(seen['metadata']['namespace'])}/{seen['metadata']['name']}/status"
        try:
            patched = await self._api.request("PATCH", path, body, content_type=content_type, timeout=TIMEOUT_SECONDS)
        except NotFound as error:
            raise Conflict(str(error)) from error
        self._seen.note(patched)

    async def _get(self, what: str) -> Object:
        return await self._api.get(f"/apis/{workloads.API}/{what}", timeout=TIMEOUT_SECONDS)

    def _mine(self, job: PipeTrainingJob) -> dict[str, Object]:
        seen = self._seen.of(JobKey.of(job))
        return {name: one for name, one in seen.items() if controller_uid(one) == job.metadata.uid}


class NoKueue(ClusterListener):
    """The quota of an operator that does not use Kueue: a job that names a queue waits, and its status says why.

    An earlier operator may have used Kueue, so this one releases the Workloads that it left.

    Args:
        api: client of the API server.
        namespaces: names of the namespaces that this operator serves; all when empty.
    """

    def __init__(self, api: Api, namespaces: Iterable[str]) -> None:
        self._api = api
        self._places = [f"/namespaces/{namespace}" for namespace in namespaces] or [""]

    @property
    def answers(self) -> None:
        """This operator does not use Kueue."""

    def observe(self, job: PipeTrainingJob) -> Queue | None:
        """See `Quota`."""
        if not job.metadata.labels.get(QUEUE_LABEL) and not job.status.quota_requests:
            return None
        return Queue(
            f"the job names a queue (label {QUEUE_LABEL}), but this operator does not use Kueue: install its chart with"
            " kueue.enabled=true, or remove the label"
        )

    async def apply(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """See `Quota`."""

    async def assigned(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> Assignment:
        """See `WorkerQuota`. Pods run anywhere."""
        return ANYWHERE

    async def run(self) -> None:
        """Drops our finalizer from all Workloads. No new ones appear, so it then returns."""
        for place in self._places:
            while True:
                try:
                    for kept in await self._kept(f"/apis/{workloads.API}{place}/workloads"):
                        await _drop_finalizer(self._api, kept)
                    break
                except (Conflict, Unavailable) as error:
                    logger.warning("cannot release Workloads of an operator that used Kueue now: %s", error)
                    await asyncio.sleep(ABANDONED_SECONDS)

    async def _kept(self, path: str) -> list[Object]:
        """Workloads that our finalizer keeps. The chart grants the right to list them where Kueue is installed."""
        try:
            found = [one async for part in self._api.list(path, QUERY) for one in part["items"]]
        except (NotFound, Refused):
            return []
        return [one for one in found if workloads.FINALIZER in one["metadata"].get("finalizers", [])]


async def _drop_finalizer(api: Api, workload: Object) -> list[str]:
    """Drops our finalizer from a Workload, and returns the finalizers of others.

    Raises:
        Conflict: it changed after it was read, so others may have added or dropped finalizers.
    """
    metadata = workload["metadata"]
    others = [one for one in metadata.get("finalizers", []) if one != workloads.FINALIZER]
    path = f"{_path(metadata['namespace'])}/{metadata['name']}"
    version = metadata["resourceVersion"]
    body = {"metadata": {"uid": metadata["uid"], "resourceVersion": version, "finalizers": others}}
    with suppress(NotFound):
        await api.request("PATCH", path, body, content_type=MERGE_PATCH, timeout=TIMEOUT_SECONDS)
    return others


def _path(namespace: str) -> str:
    return f"/apis/{workloads.API}/namespaces/{namespace}/workloads"
