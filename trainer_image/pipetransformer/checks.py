"""Rules that the CRD cannot check by itself, applied by every worker before it says that it is ready."""

from torch.nn.modules.batchnorm import _NormBase

from pipetransformer_contract.spec import TrainerSpec

from .errors import SpecError
from .models import PipelineModel


def check_spec(spec: TrainerSpec) -> None:
    """Refuse what could never train.

    Raises:
        SpecError: naming the first field that is wrong.
    """
    if spec.pipeline.stages > spec.model.num_layers:
        raise SpecError(
            "spec.pipeline.stages",
            f"{spec.pipeline.stages} stages need as many blocks, but spec.model.numLayers is {spec.model.num_layers}",
        )
    if spec.training.global_batch_size < spec.num_shards:
        raise SpecError(
            "spec.training.globalBatchSize",
            f"{spec.training.global_batch_size} samples a step are too few for {spec.num_shards} pipelines",
        )
    if (spec.training.epochs is None) == (spec.training.steps is None):
        raise SpecError("spec.training", "exactly one of epochs and steps is needed")
    if spec.evaluation.keep_best and spec.checkpoint is None:
        raise SpecError("spec.evaluation.keepBest", "needs spec.checkpoint: the best model is kept beside it")


def check_model(model: PipelineModel) -> None:
    """Refuse layers whose output depends on which samples share a micro-batch, and on which worker they are.

    Raises:
        SpecError: naming the first such layer.
    """
    for index, unit in enumerate(model.units):
        for name, module in unit.named_modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                path = ".".join(filter(None, (model.unit_name(index), name)))
                raise SpecError(
                    "spec.model",
                    f"{path} is a {type(module).__name__}, whose statistics would depend on the layout: "
                    "use LayerNorm or GroupNorm, or put its statistics into constants",
                )
