"""A test's own namespace on the API server, and waiting for what is seen in it."""

import asyncio
import contextlib
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipetransformer_contract.api import GROUP, PLURAL, VERSION
from pipetransformer_contract.api.requests import MERGE_PATCH, Object
from pipetransformer_operator.controller.ports import Unavailable
from pipetransformer_operator.kube.client.api import Api
from pipetransformer_operator.kube.watches.follow import WATCH_SECONDS
from tests.testkit.operator.builders import JobBuilder

POLL_SECONDS = 0.05


async def until(what: str, condition: Callable[[], Awaitable[Any]], timeout: float = 120) -> Any:
    """Asks again and again until the condition gives something true, and returns that. The timeout ends what hangs."""
    try:
        async with asyncio.timeout(timeout):
            while not (result := await condition()):  # noqa: ASYNC110 - it waits for another process
                await asyncio.sleep(POLL_SECONDS)
            return result
    except TimeoutError:
        raise AssertionError(f"{what}: not within {timeout} s") from None


@dataclass(frozen=True)
class _History:
    """Layouts, (stages, pipelines), that a job had: of each generation that was published, and of those confirmed."""

    published: dict[int, tuple[int, int]] = field(default_factory=dict)
    confirmed: dict[int, tuple[int, int]] = field(default_factory=dict)

    def note(self, job: Object) -> None:
        """Takes down what a job's status says."""
        if found := job.get("status", {}).get("generation"):
            self.published[found["layoutGeneration"]] = found["stages"], found["pipelines"]
            if (number := found.get("confirmedGeneration", 0)) in self.published:
                self.confirmed[number] = self.published[number]

    def since(self, generation: int) -> tuple[int, int] | None:
        """The first confirmed layout of this generation or a newer one."""
        return next((layout for number, layout in self.confirmed.items() if number >= generation), None)


class Namespace:
    """A namespace of the test's own: jobs and pods in it."""

    def __init__(self, api: Api, name: str, folder: Path, version: str) -> None:
        self.api = api
        self.name = name
        self.folder = folder
        self._histories: dict[str, _History] = defaultdict(_History)
        self._version = version
        self.jobs = f"/apis/{GROUP}/{VERSION}/namespaces/{name}/{PLURAL}"
        self.core = f"/api/v1/namespaces/{name}"

    async def apply(self, job: JobBuilder) -> None:
        """Creates the job; its record goes to the namespace's folder."""
        manifest = job.set("output", {"location": str(self.folder)}).manifest()
        manifest["metadata"]["namespace"] = self.name
        await self.api.request("POST", self.jobs, manifest)

    async def patch(self, job: str, spec: Object) -> None:
        """Edits the job's spec."""
        await self.api.request("PATCH", f"{self.jobs}/{job}", {"spec": spec}, content_type=MERGE_PATCH)

    async def bind(self, pod: str, node: str) -> None:
        """What a scheduler does."""
        binding = {"metadata": {"name": pod}, "target": {"kind": "Node", "name": node}}
        await self.api.request("POST", f"{self.core}/pods/{pod}/binding", binding)

    async def status(self, job: str = "digits") -> Object:
        """The job's status."""
        status: Object = (await self.api.get(f"{self.jobs}/{job}")).get("status", {})
        return status

    async def pods(self) -> dict[str, Object]:
        """Pods by name."""
        return {pod["metadata"]["name"]: pod for pod in (await self.api.get(f"{self.core}/pods"))["items"]}

    async def told(self, *reasons: str) -> None:
        """Waits until there is an event of each reason; events are written after the status that they explain."""

        async def all_there() -> bool:
            events = (await self.api.get(f"{self.core}/events"))["items"]
            return set(reasons) <= {event["reason"] for event in events}

        await until(f"events {', '.join(reasons)}", all_there)

    async def clear(self) -> None:
        """Deletes its jobs and pods: nothing here collects garbage, and later operators would look after them."""
        await self.api.request("DELETE", self.jobs, {})
        await self.api.request("DELETE", f"{self.core}/pods", {"gracePeriodSeconds": 0})

    def advance(self, step: int, job: str = "digits") -> None:
        """Lets the job train up to `step`."""
        folder = self.folder / job
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "advance-to").write_text(str(step))

    async def layout(self, generation: int, job: str = "digits") -> tuple[int, int]:
        """Waits until the generation is confirmed; its (stages, pipelines), even if a newer one has followed since."""
        history = self._histories[job]

        async def confirmed() -> tuple[int, int] | None:
            return history.since(generation) or await self._follow(history, generation)

        found: tuple[int, int] = await until(f"generation {generation} is confirmed", confirmed)
        return found

    async def _follow(self, history: _History, generation: int) -> tuple[int, int] | None:
        """Reads on in what was written about jobs, so no generation is too short to be seen."""
        with contextlib.suppress(Unavailable):  # the server did not keep all since the last look
            async for event in self.api.watch(self.jobs, self._version, WATCH_SECONDS):
                self._note(event["object"])
                if (layout := history.since(generation)) is not None:
                    return layout
        listed = await self.api.get(self.jobs)
        for job in listed["items"]:
            self._note(job)
        self._version = listed["metadata"]["resourceVersion"]
        return history.since(generation)

    def _note(self, job: Object) -> None:
        self._version = job["metadata"]["resourceVersion"]
        self._histories[job["metadata"].get("name", "")].note(job)

    async def state(self, state: str, job: str = "digits") -> Object:
        """Waits for the job's state; its status."""

        async def reached() -> Object | None:
            status = await self.status(job)
            return status if status.get("state") == state else None

        result: Object = await until(f"state {state}", reached)
        return result


async def new_namespace(api: Api, folder: Path) -> Namespace:
    """A namespace that nobody else uses; jobs' records go to `folder`."""
    name = f"test-{secrets.token_hex(4)}"
    made = await api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    await api.request("POST", f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "default"}})
    return Namespace(api, name, folder, made["metadata"]["resourceVersion"])
