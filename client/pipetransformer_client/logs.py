"""Reads the logs of all workers of a job as a single stream of lines.

`read` sorts the lines by the kubelet's timestamps. `follow` yields lines as they arrive, also of workers that start
later.
"""

import contextlib
import heapq
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object

from .errors import ClientError, NotFound, Refused, Unavailable
from .job import Job
from .kube import Kube, Query

POLL_SECONDS = 1.0
#: What a kubelet says of a container that has no log: it waits, or its pod ended before it could start.
_NO_LOG = ("waiting to start", "is not available", "is terminated")


@dataclass(frozen=True)
class LogLine:
    """A line of a worker's log.

    Attributes:
        time: the kubelet's timestamp of the line; empty if it has no timestamp.
        worker: name of the worker's pod.
        rank: the worker's rank in the current generation; None if it is not a member.
        text: the line.
    """

    time: str
    worker: str
    rank: int | None
    text: str


class WorkerLogs:
    """The logs of one job.

    Args:
        kube: client of the API server.
        job: a function that reads the job from the API server.
        tail: maximum number of recent lines of each worker; all lines if None.
    """

    def __init__(self, kube: Kube, job: Callable[[], Job], tail: int | None = None) -> None:
        self._kube = kube
        self._read_job = job
        self._job = job()
        self._stream: Query = {"timestamps": "true", "container": self._job.trainer}
        self._query: Query = self._stream if tail is None else {**self._stream, "tailLines": tail}

    def read(self) -> Iterator[LogLine]:
        """Yields all lines that were written so far. If a log cannot be read, as on a lost node, a line says so."""
        for moment, worker, text in heapq.merge(*(self._so_far(worker) for worker in self._phases())):
            yield LogLine(moment, worker, self._job.rank(worker), text)

    def follow(self) -> Iterator[LogLine]:
        """Yields lines until the job has ended and every log is read to its end. Continues after an outage."""
        arrived: queue.SimpleQueue[tuple[str, str, str] | ClientError] = queue.SimpleQueue()
        readers: dict[str, threading.Thread] = {}
        stopped = False
        while True:
            # Start a thread for each worker whose pod is new. During an outage, those that run continue.
            with contextlib.suppress(Unavailable):
                self._job = self._read_job()
                for worker, phase in self._phases().items():
                    if worker not in readers and phase != "Pending":
                        readers[worker] = threading.Thread(target=self._pump, args=(worker, arrived), daemon=True)
                        readers[worker].start()

            # For a while, yield what the threads read.
            finished = self._job.finished
            deadline = time.monotonic() + POLL_SECONDS
            while (left := deadline - time.monotonic()) > 0:
                try:
                    item = arrived.get(timeout=left)
                except queue.Empty:
                    break
                if isinstance(item, ClientError):
                    raise item
                moment, worker, text = item
                yield LogLine(moment, worker, self._job.rank(worker), text)

            # Look once more after the last thread has ended, because it may have read lines meanwhile.
            if stopped and arrived.empty():
                return
            stopped = finished and not any(reader.is_alive() for reader in readers.values())

    def _pump(self, worker: str, arrived: "queue.SimpleQueue[tuple[str, str, str] | ClientError]") -> None:
        """Puts the lines of a worker into the queue. Each worker has a thread that runs this.

        A stream may break, so this opens it again, until it has read a stream that it opened after the worker's end.
        """
        query: Query = {**self._query, "follow": "true"}
        newest = ""
        try:
            while True:
                over = self._job.finished
                try:
                    ended = over or not self._runs(worker)
                    begin = newest
                    for line in self._lines(worker, query):
                        if line[0] > begin:  # sinceTime has whole seconds, so the stream repeats lines
                            arrived.put(line)
                            newest = line[0]
                    if ended:
                        return
                except Unavailable:
                    if over:
                        return  # the log was lost with the node
                time.sleep(POLL_SECONDS)
                if newest:
                    query = {**self._stream, "follow": "true", "sinceTime": newest}
        except ClientError as error:
            arrived.put(error)

    def _so_far(self, worker: str) -> Iterator[tuple[str, str, str]]:
        try:
            yield from self._lines(worker, self._query)
        except Unavailable as error:
            yield "", worker, f"(the log cannot be read: {error})"

    def _lines(self, worker: str, query: Query) -> Iterator[tuple[str, str, str]]:
        try:
            for line in self._kube.lines(f"{self._pods}/{worker}/log", query):
                moment, _, text = line.partition(" ")
                yield moment, worker, text
        except NotFound:
            return  # the pod was deleted meanwhile
        except Refused as error:
            if not any(words in str(error) for words in _NO_LOG):
                raise

    def _phases(self) -> dict[str, str]:
        """The phase of each worker's pod, by its name."""
        answer = self._kube.get(self._pods, labelSelector=f"{JOB_LABEL}={self._job.name}")
        return {pod["metadata"]["name"]: _phase(pod) for pod in answer["items"] if _belongs(pod, self._job)}

    def _runs(self, worker: str) -> bool:
        """Whether the worker's pod exists and runs."""
        try:
            return _phase(self._kube.get(f"{self._pods}/{worker}")) == "Running"
        except NotFound:
            return False

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self._job.namespace}/pods"


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _belongs(pod: Object, job: Job) -> bool:
    """Whether the job owns the pod. The label alone does not tell: pods of an earlier job of that name have it, too."""
    return any(owner["uid"] == job.uid for owner in pod["metadata"].get("ownerReferences", []))
