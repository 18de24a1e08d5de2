"""A real control plane with fake nodes, and an operator as the chart installs it, whose jobs' workers only speak."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipetransformer_contract.api import GROUP, PLURAL, VERSION
from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object
from tests.testkit.cluster import installing
from tests.testkit.cluster.api_server import ApiServer, api_server
from tests.testkit.operator.charts import render
from tools.devcluster import gobuild
from tools.devcluster.layout import Layout

from .scale.cluster import OperatorProcess, control_plane, install, make_namespaces
from .scale.living import LivingJobs

TEAM = "team"
JOBS = f"/apis/{GROUP}/{VERSION}/namespaces/{TEAM}/{PLURAL}"
PODS = f"/api/v1/namespaces/{TEAM}/pods"
#: Less than the 120 s of a test, so that the message of what did not come is seen.
SECONDS = 100.0


@dataclass
class LivingCluster:
    """See the module.

    Attributes:
        jobs: those of the test.
        log: the operator's.
        news: what happened to the objects that the test follows, in the API server's order: the event's type and the
            object.
        tasks: run as long as the cluster.
    """

    api: ApiServer
    jobs: LivingJobs
    log: Path
    news: list[tuple[str, Object]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def run(self, *paths: str) -> None:
        """Starts the kubelets of the fake nodes, and notes what happens at these paths."""
        for one in (self.jobs.nodes.run(), *map(self._follow, paths)):
            self.tasks.append(asyncio.create_task(one))

    async def _follow(self, path: str) -> None:
        listed = await self.api.send("GET", path)
        async for event in self.api.events(path, listed["metadata"]["resourceVersion"]):
            self.news.append((event["type"], event["object"]))

    async def status(self, name: str) -> Object:
        """The status of a job."""
        job = await self.api.send("GET", f"{JOBS}/{name}")
        found: Object = job.get("status", {})
        return found

    async def pods(self) -> list[Object]:
        """All pods of the test's namespace."""
        found: list[Object] = (await self.api.send("GET", PODS))["items"]
        return found

    async def bound(self) -> dict[str, list[str]]:
        """Names of pods that have a node, by job."""
        found: dict[str, list[str]] = {}
        for pod in await self.pods():
            if pod["spec"].get("nodeName") and JOB_LABEL in pod["metadata"].get("labels", {}):
                found.setdefault(pod["metadata"]["labels"][JOB_LABEL], []).append(pod["metadata"]["name"])
        return found

    async def unscheduled(self) -> list[str]:
        """Names of pods for which the scheduler found no node."""
        return [
            pod["metadata"]["name"]
            for pod in await self.pods()
            for one in pod["status"].get("conditions", [])
            if (one["type"], one["status"]) == ("PodScheduled", "False")
        ]

    async def trains(self, name: str, workers: int) -> bool:
        """Whether that many workers are members of the job's present layout."""
        published = (await self.status(name)).get("generation") or {}
        return len(published.get("members", [])) == workers

    async def until(self, what: str, holds: Callable[[], Awaitable[bool]]) -> None:
        """Waits until it holds, and fails the test if that takes too long."""
        try:
            async with asyncio.timeout(SECONDS):
                while not await holds():
                    for task in (*self.tasks, *self.jobs.tasks.values()):
                        if task.done() and not task.cancelled():
                            task.result()
                    await asyncio.sleep(0.2)
        except TimeoutError:
            pytest.fail(f"not within {SECONDS:g} s: {what}\n{await self.state()}\n{self.log.read_text()[-3000:]}")

    async def state(self) -> str:
        """What jobs and pods say of themselves, for a test that fails."""
        said = []
        for kind, found in (("job", (await self.api.send("GET", JOBS))["items"]), ("pod", await self.pods())):
            for one in found:
                ends = one["metadata"].get("deletionTimestamp", "")
                said += [
                    f"{kind} {one['metadata']['name']} {ends}: {condition['type']} {condition['status']}"
                    f" {condition.get('reason')} {condition.get('message')}"
                    for condition in one.get("status", {}).get("conditions", [])
                ]
        return "\n".join(said)


@contextlib.asynccontextmanager
async def living_cluster(
    folder: Path,
    stages: int,
    version: str = gobuild.KUBERNETES,
    prepare: Callable[[Layout], None] = lambda _: None,
    **values: str,
) -> AsyncIterator[LivingCluster]:
    """A cluster of its own without nodes, until the end of the block.

    Args:
        folder: for the operator's log.
        stages: of each job.
        version: of Kubernetes.
        prepare: makes the control plane ready for the chart.
        values: of the chart, as JSON.
    """
    log = folder / "operator.log"
    async with control_plane(version) as layout, api_server(layout.kubeconfig) as api:
        await asyncio.to_thread(prepare, layout)
        await install(api)
        await make_namespaces(api, [TEAM])
        documents = render("living", **values)
        (deployment,) = (document for document in documents if document["kind"] == "Deployment")
        await installing.install(api, [document for document in documents if document is not deployment])
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        told = {name: given[name] for name in given if "PRIORITY_CLASS" in name or "GANG" in name}
        rights = await installing.as_service_account(api, layout.kubeconfig, "living-pipetransformer", folder)
        async with OperatorProcess(layout, log, KUBECONFIG=str(rights), **told) as operator:
            made = LivingCluster(api, await LivingJobs.of(operator, api, stages), log)
            try:
                yield made
            finally:
                for task in made.tasks:
                    task.cancel()
                await asyncio.gather(*made.tasks, return_exceptions=True)
        assert "forbidden" not in log.read_text().lower()
