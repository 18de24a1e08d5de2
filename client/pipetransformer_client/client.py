"""A client of PipeTrainingJobs for scripts and notebooks. The command line is built on it.

>>> client = Client.connect()
>>> job = client.submit("examples/vit-digits.yaml")
>>> for job in client.stream(job.name):
...     print(job.status.state, job.status.frozen)
>>> client.fetch_model(job.name, Path("vit"))
"""

import json
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipetransformer_contract.api.labels import CHECKPOINT_NOW_ANNOTATION
from pipetransformer_contract.api.manifest import checked, read_manifest
from pipetransformer_contract.api.requests import jobs_path
from pipetransformer_contract.api.status import CheckpointRequest
from pipetransformer_contract.api.validate import is_name
from pipetransformer_contract.messages import MAX_TOKEN

from .errors import InvalidName, NotFound, NothingToFetch, Refused, Unavailable
from .fetch import fetch_from_pod, fetch_from_url
from .job import Event, Job
from .kube import Kube
from .logs import LogLine, WorkerLogs

#: A watch of the API server is closed and opened again after this many seconds.
WATCH_SECONDS = 60
#: Seconds between two attempts to open a watch.
RETRY_SECONDS = 1.0
RECORD_FILES = ("events.jsonl", "steps.jsonl")


class Client:
    """The jobs of one cluster. All methods may raise `ClientError`; see `errors`.

    Attributes:
        namespace: namespace of the jobs whose namespace is not given.
    """

    def __init__(self, kube: Kube, namespace: str | None = None) -> None:
        self.namespace = namespace or kube.namespace
        self._kube = kube

    @classmethod
    def connect(cls, *, context: str | None = None, namespace: str | None = None) -> "Client":
        """Connects as kubectl does.

        Args:
            context: context of the kubeconfig; None for the current one.
            namespace: the client's namespace; None for that of the context.
        """
        return cls(Kube.connect(context), namespace)

    def submit(self, job: Mapping[str, Any] | str | Path) -> Job:
        """Creates a job from a manifest or a file. It goes to the client's namespace unless it names one.

        Raises:
            InvalidManifest: the job is not valid; the errors name the fields.
            OSError: the file cannot be read.
            AlreadyExists: a job of that name exists.
        """
        manifest = read_manifest(Path(job)) if isinstance(job, str | Path) else checked(job, "the manifest")
        namespace = manifest["metadata"].get("namespace") or self.namespace
        body = {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}}
        return Job.of(self._kube.request("POST", _path(namespace), body, query={"fieldValidation": "Strict"}))

    def get(self, name: str) -> Job:
        """The job as it is now."""
        return Job.of(self._kube.get(_path(self.namespace, name)))

    def jobs(self, *, all_namespaces: bool = False) -> list[Job]:
        """The jobs of the client's namespace, or of all namespaces, sorted by namespace and name."""
        answer = self._kube.get(_path(None if all_namespaces else self.namespace))
        return sorted((Job.of(item) for item in answer["items"]), key=lambda job: (job.namespace, job.name))

    def delete(self, name: str) -> None:
        """Deletes the job and its workers."""
        self._kube.request("DELETE", _path(self.namespace, name), {"propagationPolicy": "Background"})

    def suspend(self, name: str) -> Job:
        """Releases all workers of the job after a checkpoint.

        Raises:
            Refused: the job has no `spec.checkpoint`, or has ended.
        """
        return self._change(name, {"suspend": True})

    def resume(self, name: str) -> Job:
        """Resumes a suspended job from its newest checkpoint.

        Raises:
            Refused: the job has ended.
        """
        return self._change(name, {"suspend": False})

    def scale(self, name: str, max_workers: int) -> Job:
        """Sets the maximum number of workers of the job.

        Raises:
            Refused: `max_workers` is below the job's `minWorkers`, or the job has ended.
        """
        return self._change(name, {"elasticPolicy": {"maxWorkers": max_workers}})

    def checkpoint_now(self, name: str, token: str | None = None) -> str:
        """Asks for a checkpoint after the next step. Returns the token of the request, by default a new one.

        The same token asks only once. `status.checkpointRequest` names the token, and `step` once it is durable.

        Raises:
            Refused: the job has no `spec.checkpoint`, or has ended.
            ValueError: the token is empty or longer than 63 characters.
        """
        token = secrets.token_hex(4) if token is None else token
        if not 0 < len(token) <= MAX_TOKEN:
            raise ValueError(f"the token {token!r} must have 1 to {MAX_TOKEN} characters")
        job = self._changeable(name)
        if job.manifest["spec"].get("checkpoint") is None:
            raise Refused(
                f"{job.namespace}/{name} has no spec.checkpoint, so it writes no checkpoints; delete it and create it"
                " again with one"
            )
        annotations = {CHECKPOINT_NOW_ANNOTATION: token}
        self._kube.request("PATCH", _path(self.namespace, name), {"metadata": {"annotations": annotations}})
        return token

    def wait_for_checkpoint(self, name: str, token: str, *, timeout: float | None = None) -> CheckpointRequest:
        """Waits until the checkpoint of `checkpoint_now` is durable, and returns the request with its step.

        Raises:
            Refused: no checkpoint will answer the request, or another request has replaced it.
            TimeoutError: it was not durable in time.
        """
        seen = False
        try:
            for job in self.stream(name, timeout=timeout):
                request = job.status.checkpoint_request
                if request is not None and request.token == token:
                    seen = True
                    if not request.is_open:
                        break
                elif seen:
                    raise Refused(f"{job.namespace}/{name}: another request has replaced {token}")
            else:
                raise Refused(f"{job.namespace}/{name} has ended, and no checkpoint {token} is durable")
        except TimeoutError:
            words = f"checkpoint {token} is not durable after {timeout:g} s; the request stays"
            raise TimeoutError(f"{self.namespace}/{name}: {words}") from None
        if request.message:
            raise Refused(f"{job.namespace}/{name}: {request.message}")
        return request

    def _changeable(self, name: str) -> Job:
        """Reads a job that the caller is about to change.

        Raises:
            Refused: the job has ended.
        """
        if (job := self.get(name)).finished:
            raise Refused(f"{job.namespace}/{name} has ended ({job.status.state.value}) and cannot be changed")
        return job

    def _change(self, name: str, spec: Mapping[str, Any]) -> Job:
        self._changeable(name)
        return Job.of(self._kube.request("PATCH", _path(self.namespace, name), {"spec": dict(spec)}))

    def stream(self, name: str, *, timeout: float | None = None) -> Iterator[Job]:
        """Yields the job as it is now, then after each change, until it has ended.

        An outage of the API server does not end the stream. Changes during the outage are yielded as one.

        Args:
            name: name of the job.
            timeout: maximum time to wait, in seconds; no limit if None.

        Raises:
            NotFound: the job does not exist, or was deleted.
            TimeoutError: the job did not end in time.
            Unavailable: the API server did not answer the first request.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        job, version = self._read_with_version(name)
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
                time.sleep(max(0.0, started + min(RETRY_SECONDS, left) - time.monotonic()))  # a watch may end at once
                newest, version = self._read_with_version(name)
            except Unavailable:
                time.sleep(RETRY_SECONDS)
                continue
            if newest.uid != job.uid:
                raise NotFound(f"{job.namespace}/{name} was deleted, and another job now has its name")
            if newest.manifest["metadata"]["resourceVersion"] != job.manifest["metadata"]["resourceVersion"]:
                job = newest
                yield job

    def wait(self, name: str, *, timeout: float | None = None) -> Job:
        """Waits until the job has ended, and returns it. `failure` says whether it failed. Raises as `stream` does."""
        return deque(self.stream(name, timeout=timeout), maxlen=1).pop()

    def events(self, job: Job) -> list[Event]:
        """The operator's events about the job, oldest first. The cluster keeps events for an hour by default."""
        path = f"/api/v1/namespaces/{job.namespace}/events"
        answer = self._kube.get(path, fieldSelector=f"involvedObject.uid={job.uid}")
        written = sorted(answer["items"], key=lambda item: int(item["metadata"]["resourceVersion"]))
        return sorted(map(Event.of, written), key=lambda event: event.time)  # times are whole seconds

    def logs(self, name: str, *, follow: bool = False, tail: int | None = None) -> Iterator[LogLine]:
        """Yields the log lines of all workers whose pods still exist, merged by time.

        Args:
            name: name of the job.
            follow: whether to yield new lines as they are written, until the job has ended.
            tail: maximum number of recent lines of each worker.
        """
        logs = WorkerLogs(self._kube, lambda: self.get(name), tail)
        return logs.follow() if follow else logs.read()

    def fetch_model(self, name: str, folder: Path) -> Path:
        """Copies the job's model into a new or empty folder, and returns the folder.

        A model at a URL is read from this machine. A model on a volume is read through a pod that mounts the volume.

        Raises:
            FileExistsError: the folder is not empty. Files of another model, such as a chat template or shards of
                weights, would become a part of this one.
            NothingToFetch: the job keeps no results, or they cannot be read from this machine.
            ClientError: the model does not exist.
        """
        if folder.is_dir() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} is not empty: name a new folder, or its files would mix with the model")
        job = self.get(name)
        if job.results is None:
            raise NothingToFetch(f"{name} has no spec.output, so its model was deleted with its pods")
        if not job.on_volume:
            return fetch_from_url(f"{job.results}/model", folder)
        return fetch_from_pod(self._kube, job, "model", ["."], folder)

    def fetch_record(self, name: str, folder: Path) -> Path:
        """Copies the record (`events.jsonl` and `steps.jsonl`) into a folder, also while the job trains.

        Returns the folder. Raises as `fetch_model` does.
        """
        return fetch_from_pod(self._kube, self.get(name), "", RECORD_FILES, folder)

    def _read_with_version(self, name: str) -> tuple[Job, str]:
        """Reads the job and the resource version of the job list.

        A watch can start at the list's version. The job's own version may be too old for the API server.
        """
        answer = self._kube.get(_path(self.namespace), fieldSelector=_field_selector(name))
        if not answer["items"]:
            raise NotFound(f"{self.namespace}/{name}: the job does not exist")
        return Job.of(answer["items"][0]), answer["metadata"]["resourceVersion"]

    def _changes(self, job: Job, version: str, seconds: int) -> Iterator[Job]:
        """Watches the job for `seconds` seconds, and yields it after each change that is newer than `version`."""
        query: dict[str, str | int] = {
            "watch": "true",
            "fieldSelector": _field_selector(job.name),
            "resourceVersion": version,
            "timeoutSeconds": seconds,
        }
        for line in self._kube.lines(_path(job.namespace), query, silence=seconds + 10):
            event = json.loads(line)
            if event["type"] == "ERROR":  # usually because the version is too old
                return
            if event["type"] == "DELETED":
                raise NotFound(f"{job.namespace}/{job.name} was deleted")
            yield Job.of(event["object"])


def _field_selector(name: str) -> str:
    return f"metadata.name={_valid_name(name)}"


def _path(namespace: str | None, name: str | None = None) -> str:
    """Path of a job, of all jobs in a namespace, or of all jobs."""
    path = jobs_path(None if namespace is None else _valid_name(namespace))
    return path if name is None else f"{path}/{_valid_name(name)}"


def _valid_name(name: str) -> str:
    """Returns a valid name, and refuses others, because they would change the request's path.

    An empty name, for example, would make the path that of all jobs.

    Raises:
        InvalidName: the name is not valid.
    """
    if not is_name(name):
        raise InvalidName(f"{name!r} is not a valid name of a job or a namespace")
    return name
