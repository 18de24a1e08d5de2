"""Finds errors in pod templates that the CRD's CEL rules do not find.

CEL does not see all fields of a template. A new CEL rule would also refuse to suspend an older job that breaks it. So
the operator and the client make these checks themselves.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from .field_error import FieldError
from .job import JobSpec

#: Folder in the trainer container with its token and the certificates of the channel's authorities.
CHANNEL_FOLDER = "/var/run/pipetransformer"


def template_errors(spec: JobSpec) -> list[FieldError]:
    """Errors of the pod template that the API server does not find."""
    return [*_second_accelerators(spec), *_hidden_channel(spec)]


def repeated_name_errors(spec: JobSpec) -> list[FieldError]:
    """Errors of containers, and of init containers, that share a name. The API server finds them too."""
    pod = spec.pod_template.spec
    inits = [str(one.get("name")) for one in _objects((pod.model_extra or {}).get("initContainers"))]
    named = {"containers": [one.name for one in pod.containers], "initContainers": inits}
    return [
        FieldError(f"spec.podTemplate.spec.{field}", f"{name} is the name of {count} containers")
        for field, names in named.items()
        for name, count in Counter(names).items()
        if count > 1
    ]


def location_warnings(spec: JobSpec) -> list[FieldError]:
    """Warnings of locations of checkpoints and output that are on no volume of the trainer.

    Their files are lost with a pod. These are no errors, because the image may have mounts that the template does not
    name."""
    folders = [str(mount.get("mountPath")) for mount in _trainers_mounts(spec)]
    named = {"spec.checkpoint.location": spec.checkpoint, "spec.output.location": spec.output}
    return [
        FieldError(field, f"{part.location} is on no volume that the trainer mounts: its files are lost with the pod")
        for field, part in named.items()
        if part is not None
        and part.location.startswith("/")
        and not any(PurePosixPath(part.location).is_relative_to(folder) for folder in folders)
    ]


def _second_accelerators(spec: JobSpec) -> Iterator[FieldError]:
    """Errors of containers beside the trainer that ask for an accelerator, except init containers that end before the
    trainer starts."""
    pod, trainer, accelerator = spec.pod_template.spec, spec.pod_template.trainer().name, spec.accelerator_resource
    inits = _objects((pod.model_extra or {}).get("initContainers"))
    sidecars = [one for one in inits if one.get("restartPolicy") == "Always"]
    asking = [
        *(("containers", one.name, one.resources.limits) for one in pod.containers),
        *(("initContainers", one.get("name"), _limits(one)) for one in sidecars),
    ]
    for field, name, limits in asking:
        if name != trainer and str(limits.get(accelerator, 0)) != "0":
            message = f"{name} must not ask for {accelerator}: a worker has only one, for its trainer"
            yield FieldError(f"spec.podTemplate.spec.{field}", message)


def _hidden_channel(spec: JobSpec) -> Iterator[FieldError]:
    if any(str(mount.get("mountPath")).rstrip("/") == CHANNEL_FOLDER for mount in _trainers_mounts(spec)):
        message = f"nothing may be mounted at {CHANNEL_FOLDER}: the worker's token and certificates are there"
        yield FieldError("spec.podTemplate.spec.containers", message)


def _trainers_mounts(spec: JobSpec) -> list[dict[str, Any]]:
    return _objects((spec.pod_template.trainer().model_extra or {}).get("volumeMounts"))


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; empty if `value` is not a list. The API server reports values of a wrong type."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _limits(container: dict[str, Any]) -> dict[str, Any]:
    """The limits of a container; empty if they are not an object. The API server reports values of a wrong type."""
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, dict) else None
    return limits if isinstance(limits, dict) else {}
