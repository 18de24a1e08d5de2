"""The objects that the end-to-end tests apply."""

from __future__ import annotations

from tests.testkit.cluster.kube import Object

STORAGE = "/storage"
GPU = "nvidia.com/gpu"
TRAIN_SAMPLES = 1433

_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
_POD_SECURITY = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}


def digits_job(name: str, *, image: str, shared: str, on_pack: str, epochs: int) -> Object:
    """A ViT of 12 blocks on real digits, 23 steps an epoch, on 4 workers.

    By the paper's packing rule 8 frozen blocks let 4 stages shrink to 2, and 11 to 1.
    """
    storage = {"name": "storage", "hostPath": {"path": shared}}
    trainer = {
        "name": "trainer",
        "image": image,
        "securityContext": _CONTAINER_SECURITY,
        "resources": {"limits": {GPU: 1}},
        "volumeMounts": [{"name": "storage", "mountPath": STORAGE}],
    }
    return {
        "apiVersion": "training.pipetransformer.io/v1alpha1",
        "kind": "PipeTrainingJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": "vit", "numLayers": 12, "hiddenSize": 64, "numHeads": 4, "mlpSize": 128, "patchSize": 2},
            "data": {"name": "digits"},
            "training": {"epochs": epochs, "globalBatchSize": 64, "seed": 0},
            "freeze": {
                "policy": "Explicit",
                "boundaries": [{"step": 60, "boundary": 8}, {"step": 110, "boundary": 11}],
            },
            "pipeline": {"stages": 4, "microBatchSize": 16, "packing": "Paper"},
            "elasticPolicy": {"workers": 4, "minWorkers": 1, "maxWorkers": 4, "onPack": on_pack},
            "checkpoint": {"location": f"{STORAGE}/checkpoints/{name}"},
            "output": {"location": f"{STORAGE}/output"},
            "podTemplate": {
                "spec": {"securityContext": _POD_SECURITY, "containers": [trainer], "volumes": [storage]},
            },
        },
    }


def small_job(name: str, *, image: str, shared: str, stages: int = 1, workers: int = 2, epochs: int = 100) -> Object:
    """A job of two blocks whose steps take milliseconds and whose layers never freeze, on workers that are spread over
    the nodes."""
    job = digits_job(name, image=image, shared=shared, on_pack="Widen", epochs=epochs)
    spec: Object = job["spec"]
    spec["model"] |= {"numLayers": 2, "hiddenSize": 16, "mlpSize": 32, "patchSize": 4}
    spec["freeze"] = {"policy": "None"}
    spec["evaluation"] = {"everyEpochs": epochs}
    spec["pipeline"]["stages"] = stages
    spec["elasticPolicy"] |= {"workers": workers, "maxWorkers": workers, "maxPipelines": 4}
    spec["checkpoint"]["everySteps"] = 50
    template = spec["podTemplate"]["spec"]
    template["shareProcessNamespace"] = True  # the trainer can be killed: it is not the first process
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    labels = {"matchLabels": {"training.pipetransformer.io/job": name}}
    template["topologySpreadConstraints"] = [spread | {"labelSelector": labels}]
    return job


def pod(name: str, *, image: str, command: list[str], gpus: int = 0, shared: str | None = None) -> Object:
    """A pod that runs `command` once."""
    container: Object = {"name": "main", "image": image, "command": command, "securityContext": _CONTAINER_SECURITY}
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "securityContext": _POD_SECURITY,
        "containers": [container],
    }
    if gpus:
        container["resources"] = {"limits": {GPU: gpus}}
    if shared is not None:
        container["volumeMounts"] = [{"name": "storage", "mountPath": STORAGE}]
        spec["volumes"] = [{"name": "storage", "hostPath": {"path": shared}}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def idle_pod(name: str, *, image: str, gpus: int) -> Object:
    """A pod of somebody else that holds `gpus` until it is deleted."""
    return pod(name, image=image, command=["python", "-c", "import signal; signal.pause()"], gpus=gpus)
