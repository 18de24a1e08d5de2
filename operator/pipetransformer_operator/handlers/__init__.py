"""kopf's part: it watches jobs and pods and wakes the controller. No decision is made here.

The indexes are the caches that everything else reads. kopf fills them completely before it calls any event handler, so
the first turn of a job sees all of its pods.
"""

import asyncio
import logging
from typing import Any

import kopf

from ..api import GROUP, PLURAL, VERSION
from ..controller.ports import JobKey
from ..kube.api import Object
from ..plan.accounting import JOB_LABEL
from ..service import Service
from ..settings import Settings

WATCH_SECONDS = 300
CONNECT_SECONDS = 10
JOBS, PODS = "watched_jobs", "watched_pods"


async def operate(settings: Settings, *, stop: asyncio.Event | None = None) -> None:
    """Runs the operator until it is told to stop by `stop` or by a signal."""
    registry = kopf.OperatorRegistry()
    _register(registry, settings)
    await kopf.operator(
        registry=registry,
        settings=_kopf_settings(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        liveness_endpoint=f"http://{settings.host}:{settings.health_port}/healthz",
        stop_flag=stop,
    )


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    # The key is the plural name alone: `v1/pods` silently matches nothing, and every pod of the cluster is watched.
    settings.watching.label_selectors["pods"] = JOB_LABEL
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = WATCH_SECONDS + 30
    settings.watching.connect_timeout = CONNECT_SECONDS
    settings.posting.enabled = False
    settings.posting.level = logging.ERROR
    return settings


def _register(registry: kopf.OperatorRegistry, settings: Settings) -> None:
    running: list[Service] = []

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.index(GROUP, VERSION, PLURAL, id=JOBS, registry=registry)
    def index_jobs(*, namespace: str | None, name: str, body: kopf.Body, **_: Any) -> dict[JobKey, Object]:
        return {JobKey(namespace or "", name): _slim(body)}

    @kopf.index("pods", id=PODS, labels={JOB_LABEL: kopf.PRESENT}, registry=registry)
    def index_pods(*, namespace: str | None, labels: kopf.Labels, body: kopf.Body, **_: Any) -> dict[JobKey, Object]:
        return {JobKey(namespace or "", labels[JOB_LABEL]): _slim(body)}

    @kopf.on.startup(registry=registry)
    async def start(**indexes: Any) -> None:
        jobs: kopf.Index[JobKey, Object] = indexes[JOBS]
        pods: kopf.Index[JobKey, Object] = indexes[PODS]
        service = await Service.start(
            settings,
            watched_job=lambda key: next(iter(jobs.get(key, ())), None),
            watched_pods=lambda key: pods.get(key, ()),
        )
        running.append(service)

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        for service in running:
            await service.stop()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_changed(*, namespace: str | None, name: str, type: str, **_: Any) -> None:
        running[0].job_changed(JobKey(namespace or "", name), deleted=type == "DELETED")

    @kopf.on.event("pods", labels={JOB_LABEL: kopf.PRESENT}, registry=registry)
    async def pod_changed(*, namespace: str | None, uid: str, labels: kopf.Labels, type: str, **_: Any) -> None:
        key = JobKey(namespace or "", labels[JOB_LABEL])
        if type == "DELETED":
            running[0].pod_gone(key, uid)
        else:
            running[0].pod_changed(key)


def _slim(body: kopf.Body) -> Object:
    """The object without what nobody reads: managedFields are half of its size."""
    metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    return {**body, "metadata": metadata}
