"""Copies the results of a job from a URL or from the volume of its workers.

A volume is read through a pod. While the job runs, this is the leader's pod, which also has files that are on no
volume. Otherwise it is a temporary pod with the workers' image, volumes and security settings, without accelerators.
"""

import copy
import io
import secrets
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec

from pipetransformer_contract.api.job import GROUP, KIND, VERSION
from pipetransformer_contract.api.requests import Object
from pipetransformer_contract.wire import Env

from .errors import ClientError, NotFound, NothingToFetch
from .job import Job
from .kube import Kube

if TYPE_CHECKING:
    from typing_extensions import Buffer  # of collections.abc since Python 3.12

START_SECONDS = 300.0
POLL_SECONDS = 0.5
LIFE_SECONDS = 24 * 3600
#: Grace period of the temporary pod. That of the job's template may be 0, and then the API server deletes a pod before
#: its container has ended.
GRACE_SECONDS = 30
#: Resources of the temporary pod. All four values are set, because a namespace's quota may require each of them.
_RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}
#: A command that ends at SIGTERM. It blocks and awaits the signal, because Linux delivers no signal with default
#: handling to a container's first process.
_WAIT = ["python3", "-c", "import signal as s; s.pthread_sigmask(s.SIG_BLOCK, {s.SIGTERM}); s.sigwait({s.SIGTERM})"]
#: A program that writes a tar archive to its standard output. Arguments: a folder (or `$RUN_DIR`), and the names of the
#: files and folders in it.
_PACK = (
    "import os, sys, tarfile\n"
    f"folder = os.environ.get({Env.RUN_DIR!r}, '') if sys.argv[1] == '$RUN_DIR' else sys.argv[1]\n"
    "paths = {name: os.path.join(folder, name) for name in sys.argv[2:]}\n"
    "missing = [path for path in paths.values() if not os.path.exists(path)]\n"
    "if missing: sys.exit('there is no ' + ', '.join(missing))\n"
    "with tarfile.open(fileobj=sys.stdout.buffer, mode='w|') as archive:\n"
    "    for name, path in paths.items(): archive.add(path, arcname=name)\n"
)


def fetch_from_url(url: str, folder: Path) -> Path:
    """Copies the folder at an fsspec URL into `folder`, and returns `folder`.

    Raises:
        NothingToFetch: the file system of the URL is not installed, or the folder does not exist.
        ClientError: the store refused the request or did not answer.
    """
    with _store_errors(url):
        files, path = fsspec.core.url_to_fs(url)
        if not files.isdir(path):
            raise NothingToFetch(f"there is no folder {url}")
    folder.mkdir(parents=True, exist_ok=True)
    root = path.rstrip("/")
    with _store_errors(url):
        if has_magic(root):  # the path has pattern characters, which `get` would expand
            for file in files.find(root):
                place = folder / file.removeprefix(f"{root}/")
                place.parent.mkdir(parents=True, exist_ok=True)
                files.get_file(file, str(place))
        else:
            files.get(f"{root}/", f"{folder}/", recursive=True)
    return folder


@contextmanager
def _store_errors(url: str) -> Iterator[None]:
    try:
        yield
    except ClientError:
        raise
    except (ImportError, ValueError) as error:
        raise NothingToFetch(f"{url} cannot be read here: {error}") from error
    except Exception as error:  # libraries of stores raise errors of any class
        raise ClientError(f"{url} cannot be copied: {type(error).__name__}: {error}") from error


def fetch_from_pod(kube: Kube, job: Job, part: str, names: Sequence[str], folder: Path) -> Path:
    """Copies files from the job's results into `folder`, through a pod, and returns `folder`.

    Args:
        kube: client of the API server.
        job: the job.
        part: folder in the results, such as `model`; empty for the results themselves.
        names: names of files and folders in `part`. If the results are not on a volume, they are copied from the
            leader's run folder instead.
        folder: where to copy them.

    Raises:
        NothingToFetch: no pod can read the files.
        ClientError: a file does not exist, or the pod did not run.
    """
    with _pod_that_sees(kube, job) as (pod, container):
        source = f"{job.results}/{part}".rstrip("/") if job.on_volume else "$RUN_DIR"
        folder.mkdir(parents=True, exist_ok=True)
        output = kube.execute(job.namespace, pod, container, ["python3", "-c", _PACK, source, *names])
        archive = _Stream(output)
        try:
            with tarfile.open(fileobj=archive, mode="r|") as files:
                files.extractall(folder, filter="data")
        except tarfile.TarError as error:
            archive.drain()  # raises the error of the command in the pod, which says more than `error`
            raise ClientError(f"{source}: {error}") from error
        archive.drain()
    return folder


@contextmanager
def _pod_that_sees(kube: Kube, job: Job) -> Iterator[tuple[str, str]]:
    """A context with a pod that can read the results: its name, and the name of its container."""
    generation = job.status.generation
    pods = f"/api/v1/namespaces/{job.namespace}/pods"
    if (
        generation is not None
        and not job.finished
        and _phase(_status(kube, f"{pods}/{generation.leader}")) == "Running"
    ):
        yield generation.leader, job.trainer
        return
    if not job.on_volume:
        raise NothingToFetch(f"{job.name} has no spec.output on a volume, so its files were deleted with its pods")
    reader = reader_pod(job)
    path = f"{pods}/{reader['metadata']['name']}"
    kube.request("POST", pods, reader)
    try:
        deadline = time.monotonic() + START_SECONDS
        while (phase := _phase(status := _status(kube, path))) != "Running":
            if phase != "Pending" or time.monotonic() > deadline:
                raise ClientError(
                    f"pod {reader['metadata']['name']} should read the job's volume, but is {phase}{_why(status)}"
                )
            time.sleep(POLL_SECONDS)
        yield reader["metadata"]["name"], "reader"
    finally:
        with suppress(NotFound):  # it was evicted, or deleted with the job
            kube.request("DELETE", path, {})


def _status(kube: Kube, path: str) -> Object:
    try:
        return dict(kube.get(path).get("status", {}))
    except NotFound:
        return {"phase": "gone"}


def _phase(status: Object) -> str:
    return str(status.get("phase", "Pending"))


def _why(status: Object) -> str:
    """What the cluster says about a pod that does not run, as words that follow its phase; may be empty."""
    scheduled = (
        one for one in status.get("conditions", []) if (one["type"], one["status"]) == ("PodScheduled", "False")
    )
    states = (one.get("state", {}).get("waiting") for one in status.get("containerStatuses", []))
    said: Object = next(filter(None, (*scheduled, *states)), {})
    return "".join(f": {said[key]}" for key in ("reason", "message") if said.get(key))


def reader_pod(job: Job) -> Object:
    """Makes the manifest of a pod that waits until it is deleted, with the workers' image, volumes and security
    settings. The job owns the pod, so that deleting the job deletes it."""
    template = copy.deepcopy(job.manifest["spec"]["podTemplate"]["spec"])
    spec: Object = {key: value for key, value in template.items() if key not in ("resourceClaims", "resources")}
    trainer = next(one for one in spec["containers"] if one["name"] == job.trainer)
    kept = ("image", "imagePullPolicy", "volumeMounts", "securityContext", "env", "envFrom")
    container: dict[str, Any] = {key: trainer[key] for key in kept if key in trainer}
    container |= {"name": "reader", "command": _WAIT, "resources": _RESOURCES}
    spec |= {
        "containers": [container],
        "initContainers": [],
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIFE_SECONDS,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
    }
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": job.name, "uid": job.uid}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{job.name[:40].rstrip('-.')}-reader-{secrets.token_hex(4)}",
            "namespace": job.namespace,
            "ownerReferences": [owner],
        },
        "spec": spec,
    }


class _Stream(io.RawIOBase):
    """A file object over an iterator of bytes. It can be read once."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer") -> int:
        """See `io.RawIOBase`."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        target = memoryview(buffer)
        size = min(len(target), len(self._rest))
        target[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def drain(self) -> None:
        """Reads and drops the rest. If the iterator ends with an error, this raises it."""
        for _ in self._pieces:
            self._rest = memoryview(b"")
