"""A client of PipeTrainingJobs for scripts and notebooks; the command line uses nothing else.

>>> client = Client.connect()
>>> job = client.submit("examples/vit-digits.yaml")
>>> for job in client.stream(job.name):
...     print(job.status.state, job.status.frozen)
>>> client.fetch_model(job.name, Path("vit"))
"""

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipetransformer_contract.api.manifest import checked, read_manifest
from pipetransformer_contract.api.requests import jobs_path
from pipetransformer_contract.api.validate import is_name

from .errors import InvalidName, NotFound, NothingToFetch, Refused, Unavailable
from .fetch import fetch_from_pod, fetch_from_url
from .job import Event, Job
from .kube import Kube
from .logs import LogLine, WorkerLogs

#: A watch is opened anew so often, and after so long a failure to open one.
WATCH_SECONDS = 60
RETRY_SECONDS = 1.0
RECORD_FILES = ("events.jsonl", "steps.jsonl")


class Client:
    """Jobs of one cluster. Methods raise `ClientError`: see `errors`.

    Attributes:
        namespace: of jobs that are named without one.
    """

    def __init__(self, kube: Kube, namespace: str | None = None) -> None:
        self.namespace = namespace or kube.namespace
        self._kube = kube

    @classmethod
    def connect(cls, *, context: str | None = None, namespace: str | None = None) -> "Client":
        """Connects as kubectl would; both arguments are by default those of the kubeconfig."""
        return cls(Kube.connect(context), namespace)

    def submit(self, job: Mapping[str, Any] | str | Path) -> Job:
        """Creates a job from a manifest or its file. One without a namespace goes to the client's.

        Raises:
            InvalidManifest: it is no valid job; the errors name the fields.
            OSError: the file cannot be read.
            AlreadyExists: there is a job of that name.
        """
        manifest = read_manifest(Path(job)) if isinstance(job, str | Path) else checked(job, "the manifest")
        namespace = manifest["metadata"].get("namespace") or self.namespace
        body = {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}}
        return Job.of(self._kube.request("POST", _path(namespace), body, query={"fieldValidation": "Strict"}))

    def get(self, name: str) -> Job:
        """The job as it is now."""
        return Job.of(self._kube.get(_path(self.namespace, name)))

    def jobs(self, *, all_namespaces: bool = False) -> list[Job]:
        """The namespace's jobs by name, or those of all namespaces."""
        answer = self._kube.get(_path(None if all_namespaces else self.namespace))
        return sorted((Job.of(item) for item in answer["items"]), key=lambda job: (job.namespace, job.name))

    def delete(self, name: str) -> None:
        """Deletes the job and, with it, its workers."""
        self._kube.request("DELETE", _path(self.namespace, name), {"propagationPolicy": "Background"})

    def suspend(self, name: str) -> Job:
        """Gives all workers of the job back, after a checkpoint.

        Raises:
            Refused: it has no `spec.checkpoint`, or has ended.
        """
        return self._change(name, {"suspend": True})

    def resume(self, name: str) -> Job:
        """Starts a suspended job again, from its newest checkpoint.

        Raises:
            Refused: it has ended.
        """
        return self._change(name, {"suspend": False})

    def scale(self, name: str, max_workers: int) -> Job:
        """Sets how many workers the job may have at most.

        Raises:
            Refused: that is fewer than its `minWorkers`, or it has ended.
        """
        return self._change(name, {"elasticPolicy": {"maxWorkers": max_workers}})

    def _change(self, name: str, spec: Mapping[str, Any]) -> Job:
        if (job := self.get(name)).finished:
            raise Refused(f"{job.namespace}/{name} has ended ({job.status.state.value}): it cannot be changed")
        return Job.of(self._kube.request("PATCH", _path(self.namespace, name), {"spec": dict(spec)}))

    def stream(self, name: str, *, timeout: float | None = None) -> Iterator[Job]:
        """The job as it is, then as it becomes with each change, up to its end.

        Outages of the API server that begin meanwhile are waited out; what happened in them is one change.

        Args:
            name: of the job.
            timeout: seconds after which waiting ends; for ever when None.

        Raises:
            NotFound: there is no such job, or it was deleted.
            TimeoutError: the job had not ended by then.
            Unavailable: the API server does not answer the first request.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        job, version = self._look(name)
        yield job
        while not job.finished:
            started = time.monotonic()
            left = WATCH_SECONDS if deadline is None else min(WATCH_SECONDS, deadline - started)
            if left <= 0:
                raise TimeoutError(f"{job.namespace}/{name} has not ended within {timeout:g} s")
            try:
                for change in self._changes(job, version, max(1, int(left))):
                    job, version = change, change.manifest["metadata"]["resourceVersion"]
                    yield job
                    if job.finished:
                        return
                time.sleep(max(0.0, started + min(RETRY_SECONDS, left) - time.monotonic()))  # it may end at once
                newest, version = self._look(name)
            except Unavailable:
                time.sleep(RETRY_SECONDS)
                continue
            if newest.uid != job.uid:
                raise NotFound(f"{job.namespace}/{name} was deleted, and another has its name")
            if newest.manifest["metadata"]["resourceVersion"] != job.manifest["metadata"]["resourceVersion"]:
                job = newest
                yield job

    def wait(self, name: str, *, timeout: float | None = None) -> Job:
        """The job once it has ended; `failure` says whether it failed. Raises as `stream`."""
        return deque(self.stream(name, timeout=timeout), maxlen=1).pop()

    def events(self, job: Job) -> list[Event]:
        """What the operator told about the job, oldest first; the cluster forgets events, by default after an hour."""
        path = f"/api/v1/namespaces/{job.namespace}/events"
        answer = self._kube.get(path, fieldSelector=f"involvedObject.uid={job.uid}")
        written = sorted(answer["items"], key=lambda item: int(item["metadata"]["resourceVersion"]))
        return sorted(map(Event.of, written), key=lambda event: event.time)  # whose times are whole seconds

    def logs(self, name: str, *, follow: bool = False, tail: int | None = None) -> Iterator[LogLine]:
        """Lines of all workers that there still are, merged by their time; `follow` goes on to the job's end.

        Args:
            name: of the job.
            follow: whether to wait for more; lines then come as they are written.
            tail: so many lines of each worker at most.
        """
        logs = WorkerLogs(self._kube, lambda: self.get(name), tail)
        return logs.follow() if follow else logs.read()

    def fetch_model(self, name: str, folder: Path) -> Path:
        """Copies the job's model into a folder, which it returns.

        From a URL it is read here; on a mounted path by a pod with the volumes of the workers.

        Raises:
            NothingToFetch: the job keeps no results, or not where anybody can reach them.
            ClientError: it is not there.
        """
        job = self.get(name)
        if job.results is None:
            raise NothingToFetch(f"{name} has no spec.output: its model went with its pods")
        if not job.on_volume:
            return fetch_from_url(f"{job.results}/model", folder)
        return fetch_from_pod(self._kube, job, "model", ["."], folder)

    def fetch_record(self, name: str, folder: Path) -> Path:
        """Copies the record of the job's steps and regroups, which is there while it trains, too. As `fetch_model`."""
        return fetch_from_pod(self._kube, self.get(name), "", RECORD_FILES, folder)

    def _look(self, name: str) -> tuple[Job, str]:
        """The job as it is, and the version of all jobs: that of one that waits for long no watch can begin with."""
        answer = self._kube.get(_path(self.namespace), fieldSelector=_named(name))
        if not answer["items"]:
            raise NotFound(f"{self.namespace}/{name}: there is no such job")
        return Job.of(answer["items"][0]), answer["metadata"]["resourceVersion"]

    def _changes(self, job: Job, version: str, seconds: int) -> Iterator[Job]:
        """What a watch of so many seconds shows after `version`."""
        query: dict[str, str | int] = {
            "watch": "true",
            "fieldSelector": _named(job.name),
            "resourceVersion": version,
            "timeoutSeconds": seconds,
        }
        for line in self._kube.lines(_path(job.namespace), query, silence=seconds + 10):
            event = json.loads(line)
            if event["type"] == "ERROR":  # most often that the version is too old
                return
            if event["type"] == "DELETED":
                raise NotFound(f"{job.namespace}/{job.name} was deleted")
            yield Job.of(event["object"])


def _named(name: str) -> str:
    return f"metadata.name={_checked(name)}"


def _path(namespace: str | None, name: str | None = None) -> str:
    """Of a job, else of the namespace's jobs, else of all."""
    path = jobs_path(None if namespace is None else _checked(namespace))
    return path if name is None else f"{path}/{_checked(name)}"


def _checked(name: str) -> str:
    """What stands in a path for one object must not make it another's: without a name it is that of all jobs."""
    if not is_name(name):
        raise InvalidName(f"{name!r} is no name that a job or a namespace can have")
    return name
