"""Workers as pods (`WorkerPool`).

Reads come from the watch. A pod that was just created or deleted here is newer than the watch, so it is remembered
until the watch catches up.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple, Protocol

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.labels import (
    CLAIMED_LABEL,
    JOB_LABEL,
    PLACEMENT_GROUP_LABEL,
    POD_GROUP_LABEL,
    QUEUE_LABEL,
    WORKER_LABEL,
)
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.clocks import Clock, utc_now
from pipetransformer_operator.controller.ports import Conflict, Invalid, JobKey, NameConflict, Refused, Room
from pipetransformer_operator.kube.capacity.node_fit import PodShape, shape_of
from pipetransformer_operator.kube.capacity.reservations import Reservations, awaits_room, unknown_room
from pipetransformer_operator.kube.client.api import Api, NotFound
from pipetransformer_operator.kube.events import ClusterListener
from pipetransformer_operator.kube.node_health.health import NodeHealth
from pipetransformer_operator.plan import UNSEEN, DisruptionBudget, NodeFacts, Worker, worker_name

from .placement import Groups, choose_domains, prefer_nodes_with
from .pod_groups import CLAIMED, FIRST_GROUP, PodGroups, Size
from .pods import controller_uid, is_owned_by_name, is_unattended, observable, observe, tolerations, worker_id
from .protection import Protection
from .rendering import ANYWHERE, NO_CLASSES, Assignment, PriorityClasses, render

#: Grace period of pods that the operator deletes: their workers have nothing left to save, or had `stopTimeoutSeconds`
#: for it. The template's own grace period is for pods that others delete or evict.
GRACE_SECONDS = 30


class PodSource(Protocol):
    """Pods as a watch shows them."""

    def of(self, key: JobKey) -> Iterable[Object]:
        """Pods with the job's label, as the watch last showed them."""
        ...

    def listed_version(self, namespace: str) -> int:
        """Resource version of the newest list of the namespace's pods; 0 before the first."""
        ...


class NamespaceTrust(Protocol):
    """Makes workers of a namespace trust the channel."""

    async def publish(self, namespace: str) -> None:
        """Writes what workers need into the namespace.

        Raises:
            Conflict: the namespace is gone.
            Refused: the cluster does not accept it.
            Unavailable: it cannot be written now.
        """
        ...


class WorkerQuota(Protocol):
    """Says where a worker may run according to its quota."""

    async def assigned(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> Assignment:
        """What the worker's pod must carry.

        Raises:
            Refused: that is not known now.
        """
        ...


class _Shape(NamedTuple):
    """What a job's pods ask of a node."""

    version: tuple[str, int]  #: UID and generation of the job
    tolerated: Sequence[Object] | None  #: tolerations of its pods; None before there was one
    shape: PodShape


class KubePool(ClusterListener):
    """Creates and deletes the pods of all jobs' workers, and lists them as the plan sees them.

    Args:
        api: client of the API server.
        pods: knows the pods of all workers.
        channel_url: base URL of the channel, as pods reach it.
        trust: makes workers of a namespace trust the channel.
        nodes: knows which nodes have a problem; None if nodes are not watched.
        priority_classes: PriorityClasses of base and of claimed workers.
        scraper: namespace whose pods may read the workers' metrics; empty for none.
        quota: says where workers of jobs with a queue may run; None if jobs have no queue.
        reservations: know what nodes have free; None if nodes are not watched.
        clock: the present time, with its time zone.
        pod_groups: the pod groups of all jobs; None if the scheduler gives each pod a node by itself.

    Attributes:
        protection: writes what protects the workers of all jobs.
    """

    def __init__(
        self,
        api: Api,
        pods: PodSource,
        channel_url: str,
        trust: NamespaceTrust,
        nodes: NodeHealth | None = None,
        priority_classes: PriorityClasses = NO_CLASSES,
        scraper: str = "",
        quota: WorkerQuota | None = None,
        reservations: Reservations | None = None,
        clock: Clock = utc_now,
        pod_groups: PodGroups | None = None,
    ) -> None:
        self._api = api
        self._watched = pods
        self._channel_url = channel_url
        self._trust = trust
        self._nodes = nodes
        self._priority_classes = priority_classes
        self.protection = Protection(api, scraper)
        self._quota = quota
        self._reservations = reservations
        self._clock = clock
        self._pod_groups = pod_groups
        self._written: dict[JobKey, dict[str, Object]] = {}
        self._requests: Counter[JobKey] = Counter()
        self._gone_meanwhile: dict[JobKey, set[str]] = {}
        self._unattended: dict[str, datetime] = {}
        self._avoided: dict[JobKey, tuple[set[str], set[str]]] = {}
        self._placement_groups: dict[JobKey, Groups] = {}
        self._pod_group_of: dict[JobKey, dict[int, str]] = {}
        self._beginnings: dict[JobKey, dict[str, Object]] = {}
        self._shapes: dict[JobKey, _Shape] = {}

    @property
    def sees_drains(self) -> bool:
        """See `WorkerPool`."""
        return self._nodes is not None

    @property
    def nodes(self) -> NodeFacts:
        """See `WorkerPool`."""
        if self._nodes is None:
            return UNSEEN
        return NodeFacts(self._nodes.lost, self._nodes.failures, self._nodes.avoided)

    def list(self, job: PipeTrainingJob) -> tuple[Worker, ...]:
        """See `WorkerPool`."""
        trainer = job.spec.pod_template.trainer().name
        workers = [
            worker
            for pod in self._pods(job)
            if (worker := observe(pod, trainer, self._nodes, self._unattended_since(pod))) is not None
        ]
        if self._reservations is not None:
            mine = Counter(worker.node for worker in workers if worker.holds)
            shared = {node for node in mine if node and self._reservations.holders(node) > mine[node]}
            workers = [replace(worker, shares_node=True) if worker.node in shared else worker for worker in workers]
        return tuple(sorted(workers, key=lambda worker: worker.id))

    def room(self, job: PipeTrainingJob) -> Room:
        """See `WorkerPool`."""
        shape, status = self._shape(job), job.status
        if self._reservations is None:
            return unknown_room("this operator serves single namespaces and sees no nodes")
        if uncounted := shape.unknown or _uncounted_devices(job):
            return unknown_room(uncounted)
        avoided = self._nodes.avoided if self._nodes is not None else ()
        room = self._reservations.room(JobKey.of(job), shape, avoided)
        resource = job.spec.accelerator_resource
        if room.free == 0 and resource and not self._reservations.lists(resource):
            return unknown_room(f"no node lists {resource} (spec.acceleratorResource)")
        if len(status.worker_ids) >= status.initial_workers > 0 or not (status.generation or status.resize_failures):
            return room  # the job neither takes workers back nor retries
        if self._shapes[JobKey.of(job)].tolerated is None:
            return room  # a retry shows which nodes its pods tolerate
        return room._replace(reach=self._reservations.reach(shape, status.priority, avoided))

    def reserve_room(self, job: PipeTrainingJob, status: JobStatus) -> None:
        """See `WorkerPool`."""
        if self._reservations is None:
            return
        wanted = set() if status.finished else set(status.worker_ids)
        settled = {worker_id(pod) for pod in self._pods(job) if not awaits_room(pod)}
        self._reservations.reserve(JobKey.of(job), self._shape(job), len(wanted - settled))

    def _shape(self, job: PipeTrainingJob, created: Iterable[Object] = ()) -> PodShape:
        """What the job's pods ask of a node, which is remembered because every turn needs it.

        Its pods may tolerate more than its template says: admission plugins and quotas add tolerations, for example the
        one for GPU nodes on GKE. So what its pods tolerated stays known until its spec changes."""
        known, version = self._shapes.get(JobKey.of(job)), (job.metadata.uid, job.metadata.generation)
        before = known.tolerated if known is not None and known.version == version else None
        tolerated = _tolerated(created if before is not None else self._pods(job), before)
        if known is None or (known.version, known.tolerated) != (version, tolerated):
            spec = job.spec.pod_template.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
            known = self._shapes[JobKey.of(job)] = _Shape(
                version, tolerated, shape_of(_tolerating(spec, tolerated or ()))
            )
        return known.shape

    def _pods(self, job: PipeTrainingJob) -> tuple[Object, ...]:
        key = JobKey.of(job)
        pods = {pod["metadata"]["uid"]: pod for pod in self._watched.of(key)}
        written = self._written.get(key, {})
        listed = self._watched.listed_version(key.namespace)
        for uid, pod in list(written.items()):
            # A pod that a later list lacks came and went while the watch was away, so no watch tells that it is gone.
            known = _version(pods[uid]) if uid in pods else listed
            if known >= _version(pod):
                del written[uid]
        return tuple(pod for pod in {**pods, **written}.values() if controller_uid(pod) == job.metadata.uid)

    def on_pod_gone(self, key: JobKey, uid: str) -> None:
        """See `ClusterListener`."""
        written = self._written.get(key, {})
        written.pop(uid, None)
        if not written:
            self._written.pop(key, None)
        self._unattended.pop(uid, None)
        if self._requests[key]:
            self._gone_meanwhile.setdefault(key, set()).add(uid)

    def on_job_gone(self, key: JobKey) -> None:
        """See `ClusterListener`."""
        self._written.pop(key, None)
        self._avoided.pop(key, None)
        self._placement_groups.pop(key, None)
        self._pod_group_of.pop(key, None)
        self._beginnings.pop(key, None)
        self._shapes.pop(key, None)
        if self._pod_groups is not None:
            self._pod_groups.forget(key)
        if self._reservations is not None:
            self._reservations.forget(key)
        self.protection.forget(key)

    async def protect(self, job: PipeTrainingJob, budget: DisruptionBudget | None) -> None:
        """See `WorkerPool`."""
        await self.protection.apply(job, budget)

    def doubt(self, job: PipeTrainingJob, silent: Mapping[str, datetime], unfit: Mapping[str, datetime]) -> None:
        """See `WorkerPool`."""
        if self._nodes is not None:
            self._nodes.doubt(job.metadata.uid, silent, unfit)

    def blame(self, failed_devices: Mapping[str, str]) -> None:
        """See `WorkerPool`."""
        if self._nodes is not None:
            self._nodes.blame(failed_devices)

    async def prepare(self, job: PipeTrainingJob, status: JobStatus, new: Sequence[int]) -> None:
        """See `WorkerPool`. Also decides which nodes new workers avoid: once, because that looks at all workers."""
        self._avoided[JobKey.of(job)] = self._nodes_to_avoid(job)
        self._placement_groups.pop(JobKey.of(job), None)
        self._beginnings[JobKey.of(job)] = self._choose_beginnings(job, status, new)
        await self._trust.publish(job.metadata.namespace)
        if self._pod_groups is not None:
            if new:  # they would wait for a group that another client deleted
                self._pod_groups.forget(JobKey.of(job))
            groups = self._pod_group_of[JobKey.of(job)] = self._assign_pod_groups(job, status, new)
            await self._pod_groups.apply(job, self._pod_group_sizes(job, status, groups))

    async def create(self, job: PipeTrainingJob, number: int, status: JobStatus) -> None:
        """See `WorkerPool`."""
        # The pod's groups, before the first await, so that groups fill in order.
        groups = self._current_groups(job, status)
        group = groups.of(number)
        alone = groups.is_alone(group)
        pod_group = self._pod_group_of.get(JobKey.of(job), {}).get(number, "")
        if self._pod_groups is not None and not pod_group:
            raise Conflict(f"job {job.metadata.name} was deleted while its workers were created")

        # What the pod must carry, and which nodes it avoids.
        assignment = await self._quota.assigned(job, number, status) if self._quota else ANYWHERE
        path, name = _pods_path(job), worker_name(job.metadata.name, number)
        doubted, unfit = self._avoided.get(JobKey.of(job), (set(), set()))

        # The pod itself. If it exists already, an earlier attempt created it.
        try:
            pod = render(
                job,
                number,
                status,
                channel_url=self._channel_url,
                classes=self._priority_classes,
                assignment=assignment,
                group=group,
                alone=alone,
                begins=self._beginnings.get(JobKey.of(job), {}).get(group),
                doubted=doubted,
                unfit=unfit,
                avoided=self._nodes.avoided if self._nodes is not None else (),
            )
        except Refused as error:
            raise Refused(f"spec.podTemplate: {error}") from error
        if self._pod_groups is not None:
            self._pod_groups.join(pod, job, pod_group)
        with self._request_in_flight(JobKey.of(job)):
            try:
                created = await self._api.request("POST", path, pod, strict=True)
            except Invalid as error:
                raise Invalid(f"spec.podTemplate: {error}") from error
            except NotFound as error:  # the namespace is gone
                raise Conflict(str(error)) from error
            except Conflict as conflict:
                created = await self._existing_pod(job, name, conflict)

            # Without these labels and owner references no later turn would find the pod.
            if lost := _removed(created, pod):
                await self._delete_pod(path, name, created["metadata"]["uid"])
                raise Refused(f"pod {name} was deleted: an admission webhook or policy removed its {', '.join(lost)}")
            self._note(job, created)
            if JobKey.of(job) in self._shapes:  # otherwise the job is gone
                self._shape(job, [created])

    async def _existing_pod(self, job: PipeTrainingJob, name: str, conflict: Conflict) -> Object:
        """The pod of that name, which exists, if it is the job's own.

        Raises:
            Conflict: it is gone now.
            Refused: it belongs to a deleted job of the same name.
            NameConflict: it belongs to anything else.
        """
        try:
            pod = await self._api.get(f"{_pods_path(job)}/{name}")
        except NotFound:
            raise conflict from None
        if controller_uid(pod) == job.metadata.uid:
            return pod
        if is_owned_by_name(pod, job):
            raise Refused(f"pod {name} of a deleted job of the same name still exists") from conflict
        raise NameConflict(name) from conflict

    async def delete(self, job: PipeTrainingJob, name: str, uid: str) -> None:
        """See `WorkerPool`."""
        path = _pods_path(job)
        if job.metadata.deletion_timestamp:  # its pods may be orphans already, which the watch may not show yet
            with suppress(NotFound):
                if controller_uid(await self._api.get(f"{path}/{name}")) != job.metadata.uid:
                    return
        has_its_own = (job.spec.pod_template.spec.model_extra or {}).get("terminationGracePeriodSeconds") is not None
        with self._request_in_flight(JobKey.of(job)):
            ending = await self._delete_pod(path, name, uid, None if has_its_own else GRACE_SECONDS)
            if ending is None:
                self.on_pod_gone(JobKey.of(job), uid)
            else:
                self._note(job, ending)

    async def _delete_pod(self, path: str, name: str, uid: str, grace: int | None = None) -> Object | None:
        """Deletes a pod, with its own grace period or `grace` seconds. Returns the pod while it ends, None if it is
        already gone."""
        options: Object = {"preconditions": {"uid": uid}}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            deleted = await self._api.request("DELETE", f"{path}/{name}", options)
        except (NotFound, Conflict):
            return None
        ends = deleted.get("kind") == "Pod" and "deletionTimestamp" in deleted["metadata"]
        return deleted if ends and "resourceVersion" in deleted["metadata"] else None

    def _nodes_to_avoid(self, job: PipeTrainingJob) -> tuple[set[str], set[str]]:
        """Two sets of nodes to avoid: doubted nodes that have workers of the job, and all other nodes to avoid."""
        if self._nodes is None:
            return set(), set()
        doubted, unfit = set(self._nodes.doubted), set(self._nodes.unfit(job.metadata.uid))
        own = doubted & {worker.node for worker in self.list(job)} if doubted else doubted
        return own, unfit | doubted - own

    def _current_groups(self, job: PipeTrainingJob, status: JobStatus) -> Groups:
        """Deals placement groups until the next `prepare`."""
        if (groups := self._placement_groups.get(JobKey.of(job))) is None:
            groups = self._placement_groups[JobKey.of(job)] = self._groups_that_stay(job, status)
        return groups

    def _choose_beginnings(self, job: PipeTrainingJob, status: JobStatus, new: Sequence[int]) -> dict[str, Object]:
        """For each group in which no worker has a node yet: a preference for nodes of the domain where it should
        begin."""
        within, spread = job.spec.placement.within, job.spec.placement.spread
        if within is None or self._reservations is None:
            return {}
        if job.metadata.labels.get(QUEUE_LABEL) or _uncounted_devices(job):
            return {}  # a queue may limit its pods to some of the nodes, and not all room for devices is known
        groups = self._groups_that_stay(job, status)  # deals as `create` will
        begun = {
            pod["metadata"].get("labels", {}).get(PLACEMENT_GROUP_LABEL, ""): pod["spec"]["nodeName"]
            for pod in self._pods(job)
            if pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]
        }
        sizes = Counter(group for one in new if (group := groups.of(one)) not in begun)
        apart = spread is not None and spread.topology_key == within.topology_key
        avoided = self._nodes.avoided if self._nodes is not None else ()
        room = self._reservations.room_by_label(
            self._shape(job), within.topology_key, avoided, apart_from=begun.values() if apart else ()
        )
        domains = choose_domains(sizes, room, apart=apart)
        return {group: prefer_nodes_with(within.topology_key, domain) for group, domain in domains.items()}

    def _assign_pod_groups(self, job: PipeTrainingJob, status: JobStatus, new: Sequence[int]) -> dict[int, str]:
        """The pod group of each new worker: one for all while no worker of the job has a node, then one a pipeline.

        Claimed workers have groups of their own, because all pods of a group have one priority."""
        stays = set(status.worker_ids) - set(status.leaving_ids)
        begun = any(pod["spec"].get("nodeName") for pod in self._pods(job) if worker_id(pod) in stays)
        dealer = self._current_groups(job, status)
        groups = {one: dealer.of(one) if begun else FIRST_GROUP for one in new}
        return {one: group + CLAIMED if one in status.claimed_ids else group for one, group in groups.items()}

    def _pod_group_sizes(self, job: PipeTrainingJob, status: JobStatus, new: Mapping[int, str]) -> dict[str, Size]:
        """The size of each pod group that has a pod or gets one: how many of its pods the job wants."""
        stays = set(status.worker_ids) - set(status.leaving_ids)
        wanted = Counter(new.values())
        for pod in self._pods(job):
            if group := pod["metadata"].get("labels", {}).get(POD_GROUP_LABEL):
                wanted[group] += worker_id(pod) in stays
        classes = {claimed: self._priority_classes.of(job, claimed=claimed) for claimed in (False, True)}
        return {group: Size(max(1, count), classes[group.endswith(CLAIMED)]) for group, count in wanted.items()}

    def _groups_that_stay(self, job: PipeTrainingJob, status: JobStatus) -> Groups:
        """Groups of the workers that stay. A leaving worker frees its place."""
        stages = job.spec.pipeline.stages
        stays = set(status.worker_ids) - set(status.leaving_ids)
        draining = self._nodes.draining if self._nodes is not None else ()
        taken = (
            pod["metadata"].get("labels", {}).get(PLACEMENT_GROUP_LABEL, "")
            for pod in self._pods(job)
            if worker_id(pod) in stays and pod["spec"].get("nodeName") not in draining
        )
        return Groups(status.generation.stages if status.generation else stages, stages, taken)

    @contextmanager
    def _request_in_flight(self, key: JobKey) -> Iterator[None]:
        """Remembers which pods of the job go during a request, because the watch may be faster than the answer."""
        self._requests[key] += 1
        try:
            yield
        finally:
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]
                self._gone_meanwhile.pop(key, None)

    def _unattended_since(self, pod: Object) -> datetime | None:
        """Since when the pod has been unattended, by this operator's clock: the pod's times come from other clocks."""
        uid = pod["metadata"]["uid"]
        if not is_unattended(pod):
            self._unattended.pop(uid, None)
            return None
        return self._unattended.setdefault(uid, self._clock())

    def _note(self, job: PipeTrainingJob, pod: Object) -> None:
        key, uid = JobKey.of(job), pod["metadata"]["uid"]
        if uid not in self._gone_meanwhile.get(key, ()):
            self._written.setdefault(key, {})[uid] = observable(pod)


def _uncounted_devices(job: PipeTrainingJob) -> str:
    """Why no node tells how many accelerators it has for the job, in words; empty if nodes do."""
    if job.spec.accelerator_resource or not (job.spec.pod_template.spec.model_extra or {}).get("resourceClaims"):
        return ""
    return "podTemplate.spec.resourceClaims asks for devices that the operator does not count"


def _tolerated(pods: Iterable[Object], before: Sequence[Object] | None) -> Sequence[Object] | None:
    """`before`, and what else the pods tolerate; None if there is neither."""
    found = before
    for pod in pods:
        found = found or []
        more = [one for one in tolerations(pod) if one not in found]
        found = [*found, *more] if more else found
    return found


def _tolerating(spec: Object, tolerated: Sequence[Object]) -> Object:
    """The spec, with the tolerations that it lacks."""
    own = spec.get("tolerations") or []
    if not isinstance(own, list):
        return spec
    return {**spec, "tolerations": [*own, *(one for one in tolerated if one not in own)]}


def _pods_path(job: PipeTrainingJob) -> str:
    return f"/api/v1/namespaces/{job.metadata.namespace}/pods"


def _removed(created: Object, rendered: Object) -> list[str]:
    """Which labels and owner references the created pod lacks. The operator recognizes a worker by these."""
    labels, wanted = created["metadata"].get("labels", {}), rendered["metadata"]["labels"]
    lost = [
        f"label {label}" for label in (JOB_LABEL, WORKER_LABEL, CLAIMED_LABEL) if labels.get(label) != wanted[label]
    ]
    if controller_uid(created) != controller_uid(rendered):
        lost.append("ownerReferences")
    return lost


def _version(pod: Object) -> int:
    return int(pod["metadata"]["resourceVersion"])
