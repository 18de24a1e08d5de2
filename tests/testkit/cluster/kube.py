"""kubectl for tests: objects as dicts, waiting on what is observed, and a dump of a namespace for a failed test."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]
#: kubectl itself would wait for a week until a deleted object is gone.
_PATIENCE = "--timeout=180s"


@dataclass(frozen=True)
class Kube:
    """One cluster, and in it one namespace."""

    command: tuple[str, ...]
    namespace: str = "default"

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl in the namespace; raise `AssertionError` with what it said when it fails."""
        command = [*self.command, "--namespace", self.namespace, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr.strip()}"
        return done.stdout

    def apply(self, manifest: Object) -> Object:
        """Create or update an object; return it as the API server stored it."""
        stored: Object = json.loads(self.run("apply", "-f", "-", "-o", "json", stdin=json.dumps(manifest)))
        return stored

    def find(self, kind: str, name: str) -> Object | None:
        """The object, or None when there is none."""
        text = self.run("get", kind, name, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text else None

    def get(self, kind: str, name: str) -> Object:
        found = self.find(kind, name)
        assert found is not None, f"no {kind} {name} in {self.namespace}"
        return found

    def list(self, kind: str, selector: str = "") -> list[Object]:
        items: list[Object] = json.loads(self.run("get", kind, "--selector", selector, "-o", "json"))["items"]
        return items

    def delete(self, kind: str, name: str, *, wait: bool = True) -> None:
        """Delete it and return once it is gone, or without `wait` as soon as its end has begun."""
        self.run("delete", kind, name, "--ignore-not-found", f"--wait={str(wait).lower()}", _PATIENCE)

    def delete_all(self, kind: str) -> None:
        """Delete all objects of a kind and return once they are gone."""
        self.run("delete", kind, "--all", "--wait", _PATIENCE)

    def wait(
        self,
        kind: str,
        name: str,
        condition: Callable[[Object], bool],
        what: str,
        *,
        seconds: float,
        never: Callable[[Object], bool] = lambda _: False,
    ) -> Object:
        """The object as soon as `condition` holds of it.

        Raises:
            AssertionError: `what` is not so after `seconds`, or `never` held first; with the object's status.
        """
        deadline = time.monotonic() + seconds
        while True:
            found = self.find(kind, name)
            if found is not None and condition(found):
                return found
            status = json.dumps((found or {}).get("status"), indent=1)
            assert found is None or not never(found), f"{kind} {name} can no longer come to: {what}\n{status}"
            assert time.monotonic() < deadline, f"{kind} {name}, after {seconds:g} s, not: {what}\n{status}"
            time.sleep(0.3)

    def wait_gone(self, kind: str, selector: str, *, seconds: float) -> None:
        """Return once there is no such object; `AssertionError` names those that are left after `seconds`."""
        deadline = time.monotonic() + seconds
        while left := [found["metadata"]["name"] for found in self.list(kind, selector)]:
            assert time.monotonic() < deadline, f"{kind} {', '.join(left)}: not gone after {seconds:g} s"
            time.sleep(0.3)

    def dump(self, folder: Path) -> Path:
        """Write objects, events and logs of the namespace below `folder`; return where."""
        target = folder / self.namespace
        target.mkdir(parents=True, exist_ok=True)
        (target / "objects.yaml").write_text(
            self.run("get", "pipetrainingjobs,pods,deployments,configmaps", "-o", "yaml")
        )
        (target / "events.txt").write_text(self.run("get", "events", "--sort-by=.lastTimestamp"))
        for pod in self.list("pods"):
            name = pod["metadata"]["name"]
            command = [*self.command, "--namespace", self.namespace, "logs", name, "--all-containers", "--prefix"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            (target / f"{name}.log").write_text(done.stdout + done.stderr)
        return target


def has_condition(kind: str) -> Callable[[Object], bool]:
    """Whether an object's condition `kind` is True."""

    def holds(found: Object) -> bool:
        conditions = found.get("status", {}).get("conditions", [])
        return any(c["type"] == kind and c["status"] == "True" for c in conditions)

    return holds
