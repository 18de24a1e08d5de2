"""Rules that the CRD cannot check by itself, applied by every worker before it says that it is ready."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from pipetransformer.errors import SpecError, storing
from pipetransformer.models import PipelineModel, is_keyed
from pipetransformer.storage import Folder
from pipetransformer_contract.spec import TrainerSpec
from pipetransformer_contract.spec_model import SpecModel


def check_rules(spec: TrainerSpec) -> None:
    """Refuse what the CRD's own rules refuse, in their words: no API server has seen the spec of a program.

    Raises:
        SpecError: naming the first field that is wrong.
    """
    for name in type(spec).model_fields:
        part = getattr(spec, name)
        if isinstance(part, SpecModel):
            for rule in part.rules:
                if rule.holds is not None and not rule.holds(part):
                    raise SpecError(f"spec.{name}{rule.field}", rule.message)


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
    for field, location in _locations(spec):
        check_location(field, location)


def check_storage(spec: TrainerSpec) -> None:
    """Refuse to begin what could not be kept: a run writes its model at its end.

    Raises:
        SpecError: nothing here can open a location.
        StorageError: nothing can be written there.
    """
    for field, location in _locations(spec):
        folder = check_location(field, location)
        with storing(f"{field}: {location}"):
            folder.try_out()


def _locations(spec: TrainerSpec) -> Iterator[tuple[str, str]]:
    if spec.checkpoint is not None:
        yield "spec.checkpoint.location", spec.checkpoint.location
    if spec.output is not None:
        yield "spec.output.location", spec.output.location


def check_location(field: str, location: str) -> Folder:
    """The folder, but for a URL that nothing here can open.

    Raises:
        SpecError: naming `field`.
    """
    try:
        return Folder(location)
    except Exception as error:
        message = f"{location} cannot be reached from here: {type(error).__name__}: {error}"
        raise SpecError(field, message) from error


def check_resumed(ours: Mapping[str, Any], theirs: Mapping[str, Any], location: str) -> None:
    """Refuse to go on from a checkpoint with what would make another run of it.

    Args:
        ours: `Job.identity`.
        theirs: that of the run that wrote the checkpoint; of an older release it may say less.
        location: of the checkpoint.

    Raises:
        SpecError: naming the first difference.
    """
    for name, value in ours.items():
        if theirs.get(name, value) != value:
            back = f"change {name} back"
            if name == "trainingTargets":
                back = "go on with its data; what is drawn at random for them, as by random_split, wants a seed"
            raise SpecError(
                "spec.checkpoint.location",
                f"{location} holds a checkpoint of another run, whose {name} was {theirs[name]} and not {value}: "
                f"name another location, or {back}",
            )


def check_model(model: PipelineModel) -> None:
    """Refuse layers whose output, or gradient, depends on which samples share a micro-batch, or on which worker they
    are; and parameters that cannot be trained, or none.

    Raises:
        SpecError: naming the first such layer or parameter.
    """
    if not any(True for unit in model.units for _ in unit.parameters()):
        raise SpecError("spec.model", "no parameter of it wants a gradient: there is nothing to train")
    for index, unit in enumerate(model.units):
        for name, parameter in unit.named_parameters():
            if parameter.is_complex():
                raise SpecError(
                    "spec.model",
                    f"{model.unit_name(index)}.{name} is a complex parameter: keep its real and imaginary part in a "
                    "real one, and join them by torch.view_as_complex in the forward",
                )
        for name, module in unit.named_modules():
            if complaint := _complaint(module):
                path = ".".join(filter(None, (model.unit_name(index), name)))
                raise SpecError("spec.model", f"{path} is a {type(module).__name__}{complaint}")


def _complaint(module: nn.Module) -> str:
    """What is wrong with a module, after its class; empty where it can be trained."""
    match module:
        case _NormBase() if isinstance(module, _BatchNorm) or module.track_running_stats:
            return (
                ", whose statistics would depend on the layout: use LayerNorm or GroupNorm, or put its statistics into "
                "constants"
            )
        case nn.TransformerEncoderLayer() | nn.TransformerDecoderLayer() if not module.self_attn.batch_first:
            return (
                " that takes positions first, but between blocks and for its dropout samples come first: make it with "
                "batch_first=True"
            )
        case nn.RNNBase() if module.dropout and module.num_layers > 1:
            return (
                " with dropout, whose draws would depend on the layout: set dropout=0, or make one of each layer with "
                "Dropout between them"
            )
        case nn.MultiheadAttention() if module.dropout and not is_keyed(module):
            return (
                " with dropout, whose draws would depend on the layout: use nn.MultiheadAttention itself, or set "
                "dropout=0"
            )
        case nn.Embedding() | nn.EmbeddingBag() if module.scale_grad_by_freq:
            return " with scale_grad_by_freq, whose gradient would depend on the layout: do without it"
        case nn.Embedding() | nn.EmbeddingBag() if module.max_norm is not None:
            return (
                " with max_norm, which changes its weight in each forward, and the layout decides how many there are: "
                "do without it"
            )
        case nn.RReLU() | nn.FractionalMaxPool2d() | nn.FractionalMaxPool3d():  # they draw from the process's state
            return ", whose draws would depend on the layout"
        case _DropoutNd():
            return ", whose draws would depend on the layout: use Dropout"
    return ""
