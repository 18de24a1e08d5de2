"""Builders of jobs for tests: `make_job().stages(4).workers(4, most=8).release().manifest()`."""

import copy
from typing import Any, Self

from pipetransformer_contract.api import GROUP, KIND, VERSION, PipeTrainingJob


class JobBuilder:
    """A valid job of one CPU worker, changed step by step. Each method returns the builder."""

    def __init__(self, name: str = "digits") -> None:
        self._manifest: dict[str, Any] = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "model": {"name": "vit"},
                "data": {"name": "digits"},
                "training": {"epochs": 4},
                "pipeline": {"stages": 1},
                "elasticPolicy": {"workers": 1, "maxWorkers": 1},
                "acceleratorResource": "",
                "podTemplate": {"spec": {"containers": [{"name": "trainer", "image": "trainer"}]}},
            },
        }
        self._job: PipeTrainingJob | None = None

    def stages(self, stages: int) -> Self:
        return self.set("pipeline.stages", stages)

    def workers(self, workers: int, *, least: int = 1, most: int | None = None) -> Self:
        for field, value in (("workers", workers), ("minWorkers", least), ("maxWorkers", most or workers)):
            self.set(f"elasticPolicy.{field}", value)
        return self

    def on_pack(self, on_pack: str) -> Self:
        return self.set("elasticPolicy.onPack", on_pack)

    def checkpoint(self, location: str = "/checkpoints") -> Self:
        return self.set("checkpoint.location", location)

    def release(self) -> Self:
        """Gives back what packing frees, which needs a checkpoint."""
        return self.checkpoint().on_pack("Release")

    def suspended(self, suspended: bool = True) -> Self:
        return self.set("suspend", suspended)

    def label(self, key: str, value: str) -> Self:
        self._manifest["metadata"].setdefault("labels", {})[key] = value
        return self._changed()

    def command(self, *command: str) -> Self:
        """What the trainer's container runs in the place of its image's program."""
        self._manifest["spec"]["podTemplate"]["spec"]["containers"][0]["command"] = list(command)
        return self._changed()

    def set(self, path: str, value: Any) -> Self:
        """Sets `path` below spec, such as `training.epochs`."""
        *parents, last = path.split(".")
        node = self._manifest["spec"]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        return self._changed()

    def drop(self, path: str) -> Self:
        """Removes `path` below spec."""
        *parents, last = path.split(".")
        node = self._manifest["spec"]
        for parent in parents:
            node = node[parent]
        del node[last]
        return self._changed()

    def manifest(self) -> dict[str, Any]:
        return copy.deepcopy(self._manifest)

    def job(self) -> PipeTrainingJob:
        if self._job is None:  # a world asks at every turn
            self._job = PipeTrainingJob.from_manifest(self._manifest)
        return self._job

    def _changed(self) -> Self:
        self._job = None
        return self


def make_job(name: str = "digits") -> JobBuilder:
    """A valid job of one CPU worker."""
    return JobBuilder(name)
