"""What a pod template may not ask for, and CEL does not refuse: it does not see all of a template, and a rule that is
new would keep jobs of before from being suspended. So the operator looks for itself."""

from collections.abc import Iterator
from typing import Any

from .job import JobSpec
from .labels import FieldError

#: Where the trainer finds its token and whom to trust.
CHANNEL_FOLDER = "/var/run/pipetransformer"


def template_errors(spec: JobSpec) -> list[FieldError]:
    """What the API server had to let through."""
    return [*_second_accelerators(spec), *_hidden_channel(spec)]


def _second_accelerators(spec: JobSpec) -> Iterator[FieldError]:
    """An init container that ends before the trainer begins may have the same accelerator."""
    trainer, accelerator = spec.pod_template.trainer().name, spec.accelerator_resource
    pod = spec.pod_template.spec.model_dump(mode="json", by_alias=True)
    sidecars = [one for one in _objects(pod.get("initContainers")) if one.get("restartPolicy") == "Always"]
    for field, containers in (("containers", pod["containers"]), ("initContainers", sidecars)):
        for container in containers:
            limits = (container.get("resources") or {}).get("limits") or {}
            if container.get("name") != trainer and str(limits.get(accelerator, 0)) != "0":
                message = (
                    f"{container.get('name')} has {accelerator} as well: a worker has one, and that is the trainer's"
                )
                yield FieldError(f"spec.podTemplate.spec.{field}", message)


def _hidden_channel(spec: JobSpec) -> Iterator[FieldError]:
    mounts = _objects((spec.pod_template.trainer().model_extra or {}).get("volumeMounts"))
    if any(str(mount.get("mountPath")).rstrip("/") == CHANNEL_FOLDER for mount in mounts):
        message = f"nothing may be mounted at {CHANNEL_FOLDER}: the worker's token and its authorities are there"
        yield FieldError("spec.podTemplate.spec.containers", message)


def _objects(value: Any) -> list[dict[str, Any]]:
    """The API server says what else is wrong with it."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
