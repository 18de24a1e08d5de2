"""Pod groups: workers that the scheduler gives nodes all at once, or not at all.

The first workers of a job are one group, because the job starts only when all are there. Later workers are one group
for each pipeline. A group asks for as many pods as the job wants of it. The operator lowers that number before pods go.
Otherwise the scheduler would wait for those pods when another pod of the group is replaced.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.labels import JOB_LABEL, MANAGED_BY, POD_GROUP_LABEL
from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.controller.ports import Conflict, Invalid, JobKey, Refused
from pipetransformer_operator.kube.client.api import Api, NotFound

from .pods import controller_uid, is_owned_by_name
from .rendering import owner_reference

#: Name of the group of a job's first workers.
FIRST_GROUP = "start"
#: How the name of a group of claimed workers ends.
CLAIMED = "-claimed"


class Size(NamedTuple):
    """What the scheduler has to know of a group: how many pods it needs together, and their PriorityClass."""

    pods: int
    priority_class: str


@dataclass(frozen=True, slots=True)
class Scheduler:
    """How a scheduler knows groups.

    Attributes:
        api: group and version of its `PodGroup`.
        minimum: path of the number of pods in the group's spec.
        needs: what the cluster lacks if it does not serve that API.
    """

    api: str
    minimum: tuple[str, ...]
    needs: str

    def spec(self, size: Size, annotations: Mapping[str, str]) -> Object:
        """The spec of a group whose pods have these annotations."""
        spec = self.count(size.pods)
        # The scheduler refuses a group whose priority is not that of its pods.
        return {**spec, "priorityClassName": size.priority_class} if size.priority_class else spec

    def count(self, pods: int) -> Object:
        """The part of a group's spec that says how many pods it needs together."""
        value: Object | int = pods
        for field in reversed(self.minimum):
            value = {field: value}
        assert isinstance(value, dict)
        return value

    def counted(self, group: Object) -> int:
        """How many pods an existing group needs together."""
        value = group["spec"]
        for field in self.minimum:
            value = value[field]
        return int(value)

    def join(self, pod: Object, name: str) -> None:
        """Puts a pod into the group of that name."""
        pod["spec"]["schedulingGroup"] = {"podGroupName": name}


class Volcano(Scheduler):
    """Volcano reads the group's name from an annotation, and sees only pods that name it as their scheduler. A group
    joins the queue that its pods' annotation names; without one Volcano takes its default queue."""

    def spec(self, size: Size, annotations: Mapping[str, str]) -> Object:
        """See `Scheduler`."""
        queue = annotations.get("scheduling.volcano.sh/queue-name")
        return {**super().spec(size, annotations), **({"queue": queue} if queue else {})}

    def join(self, pod: Object, name: str) -> None:
        """See `Scheduler`."""
        pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] = name
        pod["spec"]["schedulerName"] = pod["spec"].get("schedulerName") or "volcano"


#: The scheduler of each value of the setting `gangScheduling`.
SCHEDULERS: Mapping[str, Scheduler] = {
    "PodGroup": Scheduler(
        "scheduling.k8s.io/v1beta1",
        ("schedulingPolicy", "gang", "minCount"),
        "Kubernetes 1.37 or newer, with the feature gate GenericWorkload and scheduling.k8s.io/v1beta1 served",
    ),
    "Volcano": Volcano("scheduling.volcano.sh/v1beta1", ("minMember",), "Volcano"),
}


class _Group(NamedTuple):
    uid: str
    pods: int


class _Known(NamedTuple):
    """A job's UID and its groups, as they were last read or written."""

    uid: str
    groups: dict[str, _Group]


def object_name(job: PipeTrainingJob, group: str) -> str:
    """Name of the group's object."""
    return f"{job.metadata.name}-{group}"


class PodGroups:
    """The groups of all jobs. It lists a job's groups, and then remembers what it wrote, until told to forget.

    Args:
        api: client of the API server.
        scheduler: the scheduler that gives pods their nodes.
    """

    def __init__(self, api: Api, scheduler: Scheduler) -> None:
        self._api = api
        self._scheduler = scheduler
        self._known: dict[JobKey, _Known] = {}

    async def apply(self, job: PipeTrainingJob, sizes: Mapping[str, Size]) -> None:
        """Creates and resizes the job's groups, and deletes groups that are not in `sizes`.

        Raises:
            Refused: the cluster does not take a group.
            Conflict, Unavailable: it cannot be written now.
        """
        key = JobKey.of(job)
        there = self._known.get(key)
        if there is None or there.uid != job.metadata.uid:
            there = self._known[key] = _Known(job.metadata.uid, await self._find(job))
        known = there.groups
        for group, size in sizes.items():
            present = known.get(group)
            if present is None or present.pods != size.pods:
                uid = await self._write(job, group, size, present.uid if present else "")
                known[group] = _Group(uid, size.pods)
        for group in known.keys() - sizes.keys():
            await self._delete(job, group, known[group].uid)
            del known[group]

    def join(self, pod: Object, job: PipeTrainingJob, group: str) -> None:
        """Puts a pod that is not created yet into a group of its job."""
        pod["metadata"]["labels"][POD_GROUP_LABEL] = group
        self._scheduler.join(pod, object_name(job, group))

    def forget(self, key: JobKey) -> None:
        """Forgets what it knows of a job's groups. Kubernetes deletes those of a job that is gone."""
        self._known.pop(key, None)

    async def _find(self, job: PipeTrainingJob) -> dict[str, _Group]:
        """The job's groups that exist."""
        prefix = object_name(job, "")
        found = {}
        try:
            async for part in self._api.list(self._path(job), {"labelSelector": f"{JOB_LABEL}={job.metadata.name}"}):
                for group in part["items"]:
                    if controller_uid(group) == job.metadata.uid:
                        uid, pods = group["metadata"]["uid"], self._scheduler.counted(group)
                        found[group["metadata"]["name"].removeprefix(prefix)] = _Group(uid, pods)
        except NotFound as error:
            raise Refused(f"gangScheduling: the cluster needs {self._scheduler.needs}: {error}") from error
        return found

    async def _write(self, job: PipeTrainingJob, group: str, size: Size, uid: str) -> str:
        """Resizes the group of that UID, or creates one if `uid` is empty. Returns its UID.

        A merge patch is invalid if the group of that name now has another UID."""
        name = object_name(job, group)
        try:
            if uid:
                change = {"metadata": {"uid": uid}, "spec": self._scheduler.count(size.pods)}
                await self._api.request("PATCH", f"{self._path(job)}/{name}", change, content_type=MERGE_PATCH)
                return uid
            created = await self._api.request("POST", self._path(job), self._object(job, name, size))
            return str(created["metadata"]["uid"])
        except (Conflict, Invalid, NotFound) as error:  # another client made or deleted it: look again in the next turn
            self.forget(JobKey.of(job))
            query = {"fieldSelector": f"metadata.name={name}"}  # a list, because that is a right that the operator has
            async for part in self._api.list(self._path(job), query):
                for kept in part["items"]:
                    await self._take_back(job, kept)
            if isinstance(error, Invalid):  # the group itself is wrong
                raise
            raise Conflict(f"PodGroup {name}: {error}") from error

    async def _take_back(self, job: PipeTrainingJob, group: Object) -> None:
        """Labels the job's own group again, so that the next turn finds it.

        Raises:
            Refused: the group is not the job's own.
        """
        name = group["metadata"]["name"]
        if not is_owned_by_name(group, job):
            raise Refused(f"PodGroup {name} exists and belongs to another owner: delete or rename it or the job")
        if controller_uid(group) != job.metadata.uid:
            raise Refused(f"PodGroup {name} of a deleted job of the same name still exists")
        change = {"metadata": {"uid": group["metadata"]["uid"], "labels": {JOB_LABEL: job.metadata.name}}}
        with suppress(NotFound):
            await self._api.request("PATCH", f"{self._path(job)}/{name}", change, content_type=MERGE_PATCH)

    async def _delete(self, job: PipeTrainingJob, group: str, uid: str) -> None:
        with suppress(NotFound, Conflict):  # a new group may have its name
            body = {"preconditions": {"uid": uid}}
            await self._api.request("DELETE", f"{self._path(job)}/{object_name(job, group)}", body)

    def _object(self, job: PipeTrainingJob, name: str, size: Size) -> Object:
        return {
            "apiVersion": self._scheduler.api,
            "kind": "PodGroup",
            "metadata": {
                "name": name,
                "namespace": job.metadata.namespace,
                "labels": {JOB_LABEL: job.metadata.name, **MANAGED_BY},
                "ownerReferences": [owner_reference(job)],
            },
            "spec": self._scheduler.spec(size, job.spec.pod_template.metadata.annotations),
        }

    def _path(self, job: PipeTrainingJob) -> str:
        return f"/apis/{self._scheduler.api}/namespaces/{job.metadata.namespace}/podgroups"
