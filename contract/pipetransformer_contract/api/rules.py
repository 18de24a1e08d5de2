"""Rules in CEL for a whole job: between fields of several sections, and for changes while a job exists.

Rules within one section stand beside its fields (`SpecModel.rules`). The CRD contains all these rules, and
`validate_manifest` evaluates the same text.
"""

from pipetransformer_contract.spec_model import Rule

#: Maximum length of a job's name. It is a part of the names of workers and of labels, whose length is limited.
MAX_NAME = 50

ROOT_RULES = (
    Rule(
        f"size(self.metadata.name) <= {MAX_NAME}",
        f"must have at most {MAX_NAME} characters, because the names of workers contain it",
        ".metadata.name",
    ),
)

#: The largest number of pipelines that the job may have at any time. A maxWorkers below workers does not reduce it.
_LARGEST_WIDTH = (
    "(has(self.elasticPolicy.maxPipelines) ? self.elasticPolicy.maxPipelines"
    " : self.elasticPolicy.workers > self.elasticPolicy.maxWorkers ? self.elasticPolicy.workers"
    " : self.elasticPolicy.maxWorkers)"
)
_CONTAINERS = "self.podTemplate.spec.containers"


def _has_one_accelerator(container: str) -> str:
    limits = f"{container}.resources.limits"
    return (
        f"has({container}.resources) && has({limits}) && self.acceleratorResource in {limits}"
        f" && string({limits}[self.acceleratorResource]) == '1'"
    )


CROSS_FIELD_RULES = (
    Rule(
        "self.elasticPolicy.workers % self.pipeline.stages == 0",
        "workers must be a multiple of pipeline.stages",
        ".elasticPolicy.workers",
    ),
    Rule(
        "self.elasticPolicy.workers / self.pipeline.stages >= self.elasticPolicy.minPipelines",
        "workers / pipeline.stages must be at least minPipelines",
        ".elasticPolicy.workers",
    ),
    Rule(
        f"self.elasticPolicy.workers / self.pipeline.stages <= {_LARGEST_WIDTH}",
        "workers / pipeline.stages must be at most maxPipelines",
        ".elasticPolicy.workers",
    ),
    Rule(
        f"self.training.globalBatchSize >= {_LARGEST_WIDTH}",
        "globalBatchSize must be at least the largest number of pipelines: maxPipelines, by default the larger of"
        " maxWorkers and workers",
        ".training.globalBatchSize",
    ),
    Rule(
        f"self.acceleratorResource == '' || ({_CONTAINERS}.exists(c, c.name == 'trainer')"
        f" ? {_CONTAINERS}.exists(c, c.name == 'trainer' && {_has_one_accelerator('c')})"
        f" : {_has_one_accelerator(_CONTAINERS + '[0]')})",
        "the container that trains (the one named trainer, otherwise the first) must have exactly 1 of"
        " acceleratorResource in resources.limits",
        ".podTemplate.spec.containers",
    ),
    Rule(
        "has(self.checkpoint) || !self.suspend",
        "suspend needs spec.checkpoint: without one all training would be lost. To change the job, delete it and create"
        " it again",
        ".suspend",
    ),
    Rule(
        "has(self.checkpoint) || !(self.elasticPolicy.onPack in ['Release', 'Auto'])",
        "onPack Release and Auto need spec.checkpoint: no worker is released before a checkpoint is durable",
        ".elasticPolicy.onPack",
    ),
    Rule(
        "self.elasticPolicy.releaseDownTo != 'StartingStep' || self.pipeline.packing == 'Measured'",
        "releaseDownTo StartingStep needs pipeline.packing Measured: packing Paper chooses layouts by memory alone",
        ".elasticPolicy.releaseDownTo",
    ),
)


def _unchanged(field: str) -> Rule:
    return Rule(f"self.{field} == oldSelf.{field}", f"{field} cannot be changed", f".{field}")


def _unchanged_optional(field: str) -> Rule:
    return Rule(
        f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        f"{field} cannot be added, changed or removed",
        f".{field}",
    )


_FIXED = ("model", "data", "training", "freeze", "pipeline", "cache", "evaluation", "acceleratorResource")
IMMUTABILITY_RULES = (
    *(_unchanged(field) for field in _FIXED),
    *(_unchanged_optional(field) for field in ("checkpoint", "mirror", "multiLevel", "output", "managedBy")),
    Rule(
        "oldSelf.suspend || self.podTemplate == oldSelf.podTemplate",
        "podTemplate can only be changed while the job is suspended",
        ".podTemplate",
    ),
)
