"""The folder of a local run. It holds the job's manifest, and a lock that only one run can take at a time.

If the command that began a run is called again with the same job, it resumes the run.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipetransformer_contract.api.schema import root_schema, with_defaults
from pipetransformer_contract.api.validate import validate_update

JOB_FILE = "job.json"
LOCK_FILE = "run.lock"
#: Seconds that workers of a killed run may take to write a checkpoint and end.
ORPHANS_SECONDS = 60.0
_POLL_SECONDS = 0.1
#: Sections that a local run does not use: it always keeps checkpoints and results in its folder.
_OVERRULED = ("spec.checkpoint", "spec.output")
_MOST_CHANGES = 5


class RunFolderError(Exception):
    """The folder cannot be used for this run. The message says why, and what to do."""


class RunFolder:
    """The folder of a run, with its lock taken. Use `open` to make one.

    Attributes:
        path: path of the folder.
        lock: file descriptor of the lock. Workers inherit it, so that the lock lasts as long as they do.
        finished: whether the job has completed.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock
        self.finished = False
        self._manifest: dict[str, Any] | None = None
        if (file := path / JOB_FILE).exists():
            try:
                content = json.loads(file.read_text())
                self._manifest, self.finished = content["job"], content["finished"]
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(f"{file} is damaged. Name another folder, or remove {path}") from error

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, *, patience_seconds: float = ORPHANS_SECONDS) -> Iterator["RunFolder"]:
        """A context that holds the folder's lock. The folder is made if it does not exist.

        Args:
            path: path of the folder.
            patience_seconds: seconds to wait until workers of an earlier run in the folder have ended.

        Raises:
            RunFolderError: another run trains in the folder, or the folder is damaged.
            OSError: the path is not a folder, or cannot be written.
        """
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _take(lock, path, patience_seconds)
            yield cls(path, lock)
        finally:
            os.close(lock)

    def claim(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the job's manifest into the folder, and returns the manifest to run.

        A job with `generateName` keeps the name that was generated for its earlier run in this folder.

        Args:
            manifest: a manifest from `local_manifest`.

        Raises:
            RunFolderError: the folder holds a run of another job, or of this job with other settings.
        """
        claimed = dict(manifest)
        if self.finished or self.trained:  # without steps, no run can be resumed or damaged
            if self._manifest is None:
                raise RunFolderError(
                    f"{self.path} holds the record of a run that this command did not begin. Name another folder, or"
                    f" remove {self.path}"
                )
            claimed = _named_as(self._manifest, claimed)
            self._check(claimed)
        self._manifest = claimed
        self._write()
        return claimed

    def finish(self) -> None:
        """Writes into the folder that the job has completed."""
        self.finished = True
        self._write()

    def checkpoint_step(self) -> int | None:
        """Number of committed steps in the newest checkpoint; None if there is no checkpoint."""
        found = []
        for marker in self.path.glob("checkpoints/step-*/DONE.json"):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # the trainer ignores a damaged marker, too
                content = json.loads(marker.read_text())
                found.append((content["layoutGeneration"], content["step"]))
        return max(found)[1] if found else None

    @property
    def trained(self) -> bool:
        """Whether a run has committed a step in this folder."""
        return (self.path / "steps.jsonl").exists()

    def _check(self, manifest: Mapping[str, Any]) -> None:
        assert self._manifest is not None
        was, name = self._manifest["metadata"]["name"], manifest["metadata"]["name"]
        if was != name:
            raise RunFolderError(
                f"{self.path} holds a run of another job, {was}. Name another folder for {name}, or remove {self.path}"
            )
        if changes := _changes(self._manifest, manifest):
            more = f", and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
            raise RunFolderError(
                f"{self.path} holds a run of {name} with other settings: {', '.join(changes[:_MOST_CHANGES])}{more}."
                f" Put them back to resume it. To start over, name another folder or remove {self.path}"
            )

    def _write(self) -> None:
        partial = self.path / f"{JOB_FILE}.partial"
        partial.write_text(json.dumps({"job": self._manifest, "finished": self.finished}, indent=2) + "\n")
        partial.replace(self.path / JOB_FILE)


def _take(lock: int, path: Path, patience_seconds: float) -> None:
    """Takes the lock of a folder. Does nothing on a file system without locks.

    Workers of an earlier run may still hold the lock although the run's own process has ended. This waits until they
    end.

    Raises:
        RunFolderError: another run trains in the folder, or its workers have not ended after `patience_seconds`.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode().strip()
            if holder and Path(f"/proc/{holder}").exists():
                raise RunFolderError(
                    f"a run trains in {path} already (process {holder}). Wait for it, interrupt it, or name another"
                    " folder"
                ) from None
            if time.monotonic() >= deadline:
                raise RunFolderError(
                    f"workers of an earlier run still train in {path}: end them, or name another folder"
                ) from None
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            return
        else:
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            return


def _named_as(before: Mapping[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest. If it has the same `generateName` as the manifest `before`, it gets the name generated for that."""
    was, metadata = before["metadata"], manifest["metadata"]
    if not metadata.get("generateName") or metadata["generateName"] != was.get("generateName"):
        return manifest
    return {**manifest, "metadata": {**metadata, "name": was["name"]}}


def _changes(before: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Describe the changes that prevent a resume: changes of fields that the CRD does not allow to change.

    `podTemplate` may change, because an interrupted run is treated like a suspended job on a cluster.
    """
    old = {**before, "spec": {**before["spec"], "suspend": True}}
    fixed = [error.path for error in validate_update(old, manifest) if error.path not in _OVERRULED]
    was, now = (_leaves(with_defaults(root_schema(), one)["spec"], "spec") for one in (before, manifest))
    return [
        f"{path} was {json.dumps(was.get(path))} and is {json.dumps(now.get(path))}"
        for path in sorted(was.keys() | now.keys())
        if was.get(path) != now.get(path) and any(f"{path}.".startswith(f"{section}.") for section in fixed)
    ]


def _leaves(value: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The values in an object, by their full path below `path`. A list counts as one value."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= _leaves(item, f"{path}.{name}") if isinstance(item, Mapping) and item else {f"{path}.{name}": item}
    return found
