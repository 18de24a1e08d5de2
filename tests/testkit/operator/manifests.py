"""Manifests that are valid, refused, or refused as a change."""

from tests.testkit.operator.builders import JobBuilder, make_job


def causal_job() -> JobBuilder:
    """A job whose model TeraPipe takes."""
    return make_job().set("model", {"name": "huggingface", "options": {"model_type": "gpt2"}}).set("data.name", "text")


def levels_job(**changed: object) -> JobBuilder:
    """A job that trains a smaller model for a while."""
    levels = {"descentSteps": 2, "ascentSteps": 6} | changed
    return make_job("levels").checkpoint("/checkpoints").set("training", {"steps": 20}).set("multiLevel", levels)


VALID = [
    levels_job(),
    levels_job(levels=3, widthFactor=1, descentSteps=1),
    make_job(),
    make_job().stages(4).workers(8, most=16),
    make_job().stages(2).workers(4).release(),
    make_job().stages(4).workers(8, most=2),
    make_job().workers(8192, least=8192, most=8192).set("training.globalBatchSize", 8192),  # stored by operators before
    make_job().checkpoint("s3://bucket/x").suspended(),
    make_job().set("model.name", "mine.models:build").set("model.options", {"depth": 3}),
    make_job().set("freeze.policy", "mine.policies:Mine").set("freeze.options", {"blocks": 3}),
    make_job().set("freeze.startAfterSteps", 100).set("freeze.intervalSteps", 10),
    make_job().set("freeze.policy", "GradientNorm").set("freeze.trial.steps", 50).set("freeze.never", ["head"]),
    make_job().set("freeze.policy", "None").set("freeze.always", ["embedding", "blocks.0"]),
    make_job().set("model.name", "script").set("data.name", "script").set("freeze.policy", "Script"),
    make_job().set("evaluation", {"everySteps": 5, "bestMetric": "loss", "goal": "Lowest", "patience": 3}),
    make_job().set("model.name", "huggingface").set("model.path", "some/checkpoint").set("data.name", "text"),
    make_job("a" * 50),
    make_job().label("kueue.x-k8s.io/queue-name", ""),  # as a chart writes it for a team without a queue
    make_job().set("data.options", {"max_length": 10**30}),  # as tokenizers of transformers say that they have no limit
    make_job().set("data.options", {"max_length": 2**63}),
    make_job().set("pipeline.schedule", "Auto").set("pipeline.packing", "Measured"),
    causal_job().set("pipeline", {"schedule": "TeraPipe", "tokenSlices": "Auto", "sliceMultiple": 8}),
    make_job().set("pipeline.schedule", "Interleaved").set("pipeline.frozenForward", "Ahead"),
    make_job().set("pipeline.frozenForward", "Auto").set("pipeline.packing", "Measured"),
    make_job().set("pipeline.schedule", "PipeOptim").set("pipeline.stepsPerRound", 8),
    make_job().set("pipeline.schedule", "PipeDream").set("training.optimizer.name", "RMSprop"),
    make_job().set("pipeline.schedule", "AsyncOneForwardOneBackward").set("training.optimizer.name", "Adam"),
    make_job().set("training.optimizer", {"name": "RMSprop", "alpha": 0.5, "epsilon": 1e-6, "beta1": 0.9}),
    make_job().set("training.optimizer", {"name": "SGD", "momentum": 0.5}),
]


GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
#: Containers of a pod.
TRAINER, SIDECAR = {"name": "trainer", "image": "trainer"} | GPU, {"name": "logs", "image": "logs"}


REFUSED = [
    (levels_job(depthFactor=1, widthFactor=1), "spec.multiLevel.depthFactor"),
    (levels_job(alpha=0), "spec.multiLevel.alpha"),
    (levels_job(levels=1), "spec.multiLevel.levels"),
    (levels_job(ascentSteps=18), "spec.multiLevel"),
    (levels_job().drop("checkpoint"), "spec.multiLevel"),
    (levels_job().set("pipeline.schedule", "PipeOptim"), "spec.multiLevel"),
    (make_job("a" * 51), "metadata.name"),
    (make_job("a/b"), "metadata.name"),
    (make_job("Digits"), "metadata.name"),
    (
        make_job().set("podTemplate.spec.containers", [{"name": "trainer", "resources": {"limits": {"cpu": 0.5}}}]),
        "spec.podTemplate.spec.containers[0].resources.limits.cpu",
    ),
    (make_job().stages(3).workers(4), "spec.elasticPolicy.workers"),
    (make_job().set("pipeline.spansPerWorker", 2), "spec.pipeline.spansPerWorker"),
    (
        make_job().set("pipeline.schedule", "Interleaved").set("pipeline.spansPerWorker", 0),
        "spec.pipeline.spansPerWorker",
    ),
    (
        make_job().set("pipeline.schedule", "ZeroBubbleV").set("pipeline.spansPerWorker", 3),
        "spec.pipeline.spansPerWorker",
    ),
    (make_job().set("pipeline.tokenSlices", 2), "spec.pipeline.tokenSlices"),
    (make_job().set("pipeline.sliceMultiple", 8), "spec.pipeline.sliceMultiple"),
    (causal_job().set("pipeline.schedule", "TeraPipe").set("pipeline.tokenSlices", 0), "spec.pipeline.tokenSlices"),
    (causal_job().set("pipeline.schedule", "TeraPipe").set("pipeline.tokenSlices", "Few"), "spec.pipeline.tokenSlices"),
    (causal_job().set("pipeline.schedule", "TeraPipe").set("pipeline.sliceMultiple", 0), "spec.pipeline.sliceMultiple"),
    (make_job().set("pipeline.stepsPerRound", 8), "spec.pipeline.stepsPerRound"),
    (make_job().set("pipeline.schedule", "PipeOptim").set("pipeline.stepsPerRound", 0), "spec.pipeline.stepsPerRound"),
    (
        make_job().set("pipeline.schedule", "PipeDream").set("pipeline.frozenForward", "Ahead"),
        "spec.pipeline.frozenForward",
    ),
    (
        make_job().set("pipeline.schedule", "PipeOptim").set("training.maxGradientNorm", 1.0),
        "spec.training.maxGradientNorm",
    ),
    (
        make_job().set("pipeline.schedule", "PipeOptim").set("training.activationCheckpointing", True),
        "spec.training.activationCheckpointing",
    ),
    (make_job().set("pipeline.schedule", "Auto"), "spec.pipeline.schedule"),
    (make_job().set("pipeline.schedule", "TeraPipe"), "spec.pipeline.schedule"),
    (
        make_job().set("pipeline.schedule", "Interleaved").set("pipeline.tokenSlices", 2),
        "spec.pipeline.tokenSlices",
    ),
    (
        make_job().set("pipeline", {"schedule": "Auto", "packing": "Measured", "sliceMultiple": 8}),
        "spec.pipeline.sliceMultiple",
    ),
    (
        make_job().set("pipeline", {"schedule": "Auto", "packing": "Measured", "spansPerWorker": 2}),
        "spec.pipeline.spansPerWorker",
    ),
    (make_job().set("pipeline.frozenForward", "Auto"), "spec.pipeline.frozenForward"),
    (
        causal_job().set("pipeline.schedule", "TeraPipe").set("pipeline.frozenForward", "Ahead"),
        "spec.pipeline.frozenForward",
    ),
    (
        make_job().set("pipeline.schedule", "Script").set("pipeline.frozenForward", "Ahead"),
        "spec.pipeline.frozenForward",
    ),
    (make_job().stages(16).workers(16), "spec.pipeline.stages"),
    (make_job().stages(13).workers(13), "spec.pipeline.stages"),
    (make_job().workers(4, least=5, most=8), "spec.elasticPolicy.minWorkers"),
    (make_job().workers(4, least=4, most=3), "spec.elasticPolicy.maxWorkers"),
    (make_job().workers(4, most=100), "spec.training.globalBatchSize"),
    (make_job().workers(100, most=4), "spec.training.globalBatchSize"),
    (make_job().workers(4).set("elasticPolicy.maxPipelines", 2), "spec.elasticPolicy.workers"),
    (make_job().stages(2).workers(4).set("elasticPolicy.minPipelines", 3), "spec.elasticPolicy.workers"),
    (make_job().on_pack("Release"), "spec.elasticPolicy.onPack"),
    (make_job().on_pack("Auto"), "spec.elasticPolicy.onPack"),
    (make_job().set("elasticPolicy.releaseDownTo", "StartingStep"), "spec.elasticPolicy.releaseDownTo"),
    (make_job().release().set("elasticPolicy.releaseDownTo", "StartingStep"), "spec.elasticPolicy.releaseDownTo"),
    (make_job().suspended(), "spec.suspend"),
    (make_job().label("kueue.x-k8s.io/queue-name", "team"), "metadata.labels[kueue.x-k8s.io/queue-name]"),
    (make_job().set("acceleratorResource", "nvidia.com/gpu"), "spec.podTemplate.spec.containers"),
    (
        causal_job().set("pipeline.schedule", "TeraPipe").set("pipeline.tokenSlices", 2**63),
        "spec.pipeline.tokenSlices",
    ),
    (make_job().set("podTemplate.spec.containers", [TRAINER, SIDECAR, SIDECAR]), "spec.podTemplate.spec.containers"),
    (make_job().set("training.steps", 3), "spec.training"),
    (make_job().set("training.epochs", 0), "spec.training.epochs"),
    (make_job().set("training.epochs", "4"), "spec.training.epochs"),
    (make_job().set("freeze.policy", "Explicit"), "spec.freeze.boundaries"),
    (make_job().set("freeze.alpha", 1.5), "spec.freeze.alpha"),
    (make_job().set("freeze.policy", "Sometimes"), "spec.freeze.policy"),
    (make_job().set("freeze.percentile", 101), "spec.freeze.percentile"),
    (make_job().set("freeze.windowDecisions", 1), "spec.freeze.windowDecisions"),
    (make_job().set("freeze.learningRateDrop", 1), "spec.freeze.learningRateDrop"),
    (
        make_job().set("freeze.startAfterEpochs", 1).set("freeze.startAfterSteps", 1),
        "spec.freeze.startAfterSteps",
    ),
    (make_job().set("freeze.intervalEpochs", 1).set("freeze.intervalSteps", 1), "spec.freeze.intervalSteps"),
    (make_job().set("freeze.aplha", 0.5), "spec.freeze.aplha"),
    (make_job().set("freeze.policy", "None").set("freeze.trial.steps", 50), "spec.freeze.trial"),
    (make_job().set("freeze.policy", "GradientNorm").set("freeze.trial.steps", 9), "spec.freeze.trial.steps"),
    (make_job().set("freeze.policy", "GradientNorm").set("freeze.never", [""]), "spec.freeze.never[0]"),
    (make_job().set("evaluation", {"keepBest": True}), "spec.evaluation.keepBest"),
    (make_job().set("evaluation", {"everySteps": 1, "everyEpochs": 1}), "spec.evaluation"),
    (make_job().set("evaluation.bestMetric", "loss"), "spec.evaluation.goal"),
    (make_job().set("evaluation.metrics", ["f1"]), "spec.evaluation.metrics[0]"),
    (make_job().set("model.name", "bert"), "spec.model.name"),
    (make_job().set("model.path", "some/checkpoint"), "spec.model.name"),
    (make_job().set("model.architecture", "GPT2LMHeadModel"), "spec.model.name"),
    (make_job().set("data.name", "images"), "spec.data.name"),
    (make_job().set("model.numHeads", 5), "spec.model.hiddenSize"),
    *(
        (make_job().set("model", {"name": "mine.models:build", field: value}), f"spec.model.{field}")
        for field, value in {"hiddenSize": 128, "numHeads": 8, "mlpSize": 64, "patchSize": 4, "dropout": 0.5}.items()
    ),
    *(
        (make_job().set("training.optimizer", {"name": name, field: 0.5}), f"spec.training.optimizer.{field}")
        for name, fields in {"AdamW": ["momentum", "alpha"], "RMSprop": ["beta1", "beta2"], "SGD": ["epsilon"]}.items()
        for field in fields
    ),
    (make_job().set("cache", {"policy": "Always", "memoryBytes": 0}), "spec.cache.policy"),
    (make_job().set("cache.diskBytes", -1), "spec.cache.diskBytes"),
    (make_job().checkpoint("relative/path"), "spec.checkpoint.location"),
    (make_job().checkpoint("S3://bucket/x"), "spec.checkpoint.location"),
    (make_job().set("output.location", "relative/path"), "spec.output.location"),
    (make_job().set("data.name", "imagenet"), "spec.data.name"),
    (
        make_job().workers(4).set("elasticPolicy.maxPipelines", 4).set("elasticPolicy.minPipelines", 5),
        "spec.elasticPolicy.minPipelines spec.elasticPolicy.workers",
    ),
    (make_job().drop("podTemplate"), "spec.podTemplate"),
]


def old_job() -> JobBuilder:
    """What the rows below change."""
    return make_job().set("podTemplate.spec.containers", [{"name": "trainer", "image": "trainer"} | GPU])


_CHANGES = [
    (old_job().set("model.options", {"a": 2}), "spec.model"),
    (old_job().set("data.path", "/elsewhere"), "spec.data"),
    (old_job().set("training.epochs", 5), "spec.training"),
    (old_job().set("freeze.alpha", 0.25), "spec.freeze"),
    (old_job().set("pipeline.schedule", "GPipe"), "spec.pipeline"),
    (old_job().set("cache.diskBytes", 1), "spec.cache"),
    (old_job().set("evaluation.everySteps", 7), "spec.evaluation"),
    (old_job().set("acceleratorResource", "nvidia.com/gpu"), "spec.acceleratorResource"),
    (old_job().checkpoint(), "spec.checkpoint"),
    (old_job().set("output.location", "/elsewhere"), "spec.output"),
    (old_job().set("mirror.everySteps", 5), "spec.mirror"),
    (old_job().set("managedBy", "someone/else"), "spec.managedBy"),
    (old_job().set("podTemplate.spec.hostNetwork", True), "spec.podTemplate"),
]
#: (old job, changed job, where the error is)
CHANGED = [
    *((old_job(), changed, path) for changed, path in _CHANGES),
    (levels_job(), levels_job(alpha=0.25), "spec.multiLevel"),
]
