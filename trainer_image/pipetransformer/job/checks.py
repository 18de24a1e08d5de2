"""Checks that every worker makes before it reports that it is ready.

The CRD's rules cannot make most of them, because they need the data, the model or the storage.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic.alias_generators import to_camel
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from pipetransformer.data import DataInfo, Dataset, Task
from pipetransformer.errors import SpecError, storing
from pipetransformer.models import PipelineModel, is_keyed
from pipetransformer.storage import Folder
from pipetransformer_contract.spec import ASYNCHRONOUS, NEEDS_ORDER, READS_PICTURES, Evaluation, Pipeline, TrainerSpec
from pipetransformer_contract.spec_model import SpecModel

#: What to do if a location holds the checkpoint of another run. A local run keeps its checkpoints in its own folder.
ANOTHER_LOCATION = "name another location (with `pipetransformer run`, another --run-dir)"
#: Names of values in `Job.identity` that are not fields of the spec, as words.
_WORDS = {"parameters": "number of parameters"}
#: How to make these values what they were.
_BACK = {
    "parameters": "use the same model",
    "trainingTargets": "use the same data (a random split, such as random_split, needs a fixed seed)",
}


def check_parts(spec: TrainerSpec) -> None:
    """Check each section of a spec by the CRD's rules for it. No API server has checked the spec of a program.

    Raises:
        SpecError: names the first wrong field.
    """
    for name in type(spec).model_fields:
        part = getattr(spec, name)
        if isinstance(part, SpecModel):
            _check_rules(part, f"spec.{to_camel(name)}")


def _check_rules(part: SpecModel, path: str) -> None:
    for rule in part.rules:
        if rule.holds is not None and not rule.holds(part):
            raise SpecError(f"{path}{rule.field}", rule.message)


def check_spec(spec: TrainerSpec) -> None:
    """Refuse a spec that breaks one of the CRD's rules, or names a location whose URL cannot be opened here.

    Raises:
        SpecError: names the first wrong field.
    """
    check_parts(spec)
    _check_rules(spec, "spec")
    for field, location in _locations(spec):
        check_location(field, location)


def check_storage(spec: TrainerSpec) -> None:
    """Refuse a location of checkpoints or output that cannot be written. Otherwise a run would fail only at its end.

    Raises:
        SpecError: a location's URL cannot be opened here.
        StorageError: a location cannot be written.
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
    """Open the folder at a location, and refuse a URL that cannot be opened on this machine.

    Args:
        field: path of the spec's field, which the error names.
        location: absolute path or fsspec URL.

    Raises:
        SpecError: the URL cannot be opened, as without the library for its protocol.
    """
    try:
        return Folder(location)
    except Exception as error:
        message = f"{location} cannot be reached from here: {type(error).__name__}: {error}"
        raise SpecError(field, message) from error


def check_resumed(ours: Mapping[str, Any], theirs: Mapping[str, Any], location: str) -> None:
    """Refuse to resume a checkpoint of another run.

    Args:
        ours: this job's `Job.identity`.
        theirs: the identity of the run that wrote the checkpoint. Fields that are missing in it are not compared.
        location: location of the checkpoints, which the error names.

    Raises:
        SpecError: names the first field that differs.
    """
    for name, value in ours.items():
        if theirs.get(name, value) != value:
            back = _BACK.get(name, f"change {name} back")
            raise SpecError(
                "spec.checkpoint.location",
                f"{location} holds a checkpoint of another run, whose {_WORDS.get(name, name)} was {theirs[name]} and"
                f" not {value}: {ANOTHER_LOCATION}, or {back}",
            )


def check_held_out(spec: Evaluation, count: int) -> None:
    """Refuse settings that nothing would follow from, because there are no evaluations.

    Args:
        spec: the section `evaluation` of the spec.
        count: number of held-out samples.

    Raises:
        SpecError: names the field.
    """
    for field, is_set in (("keepBest", spec.keep_best), ("patience", spec.patience is not None)):
        if is_set and not count:
            raise SpecError(
                f"spec.evaluation.{field}",
                "needs held-out samples, but the data have none: hold some out, or remove it",
            )


def check_targets(spec: Pipeline, dataset: Dataset) -> None:
    """Refuse targets that change each time that they are read, if a pipeline has several stages.

    Raises:
        SpecError: some targets changed.
    """
    if spec.stages > 1 and dataset.targets_change:
        raise SpecError(
            "spec.data",
            "targets change each time that samples are read, but the first and the last stage read them separately:"
            " draw by the sample and the step, as an AugmentedSplit does",
            reason="DataUnreadable",
        )


def check_slices(spec: Pipeline, model: PipelineModel, name: str, info: DataInfo, targets: Tensor) -> None:
    """Refuse a model or data that does not allow TeraPipe, which cuts samples into slices of tokens.

    Args:
        spec: the section `pipeline` of the spec.
        model: the model to train.
        name: name of the model's class or function, which the error names.
        info: facts about the data.
        targets: (samples, ...) targets of some samples.

    Raises:
        SpecError: names the field and the reason.
    """
    if not model.slices_tokens:
        raise SpecError(
            "spec.pipeline.schedule",
            f"{NEEDS_ORDER}: {name} {_why_no_slices(info)}",
        )
    total = model.activation_shape(1)[1]
    if targets.shape[1:2] != (total,):
        raise SpecError(
            "spec.pipeline.schedule",
            f"TeraPipe needs a target for each of {total} positions, but targets have the shape "
            f"{tuple(targets.shape[1:])}",
        )
    slices, multiple = spec.token_slices, spec.slice_multiple or 1
    if isinstance(slices, int) and slices > total:
        raise SpecError("spec.pipeline.tokenSlices", f"is {slices}, but samples have {total} tokens")
    if isinstance(slices, int) and (slices - 1) * multiple >= total:
        raise SpecError(
            "spec.pipeline.tokenSlices",
            f"{slices} slices of multiples of {multiple} tokens do not fit samples of {total} tokens",
        )


def _why_no_slices(info: DataInfo) -> str:
    """Why a model cannot run slices of tokens, as words that follow the model's name."""
    if len(info.input_shape) == 3:
        return READS_PICTURES
    if info.task in (Task.CLASS, Task.MASKED_TOKEN):
        return "is bidirectional"
    return "does not promise it with slices_tokens=True (docs/models.md)"


def check_asynchronous(spec: Pipeline, model: PipelineModel) -> None:
    """Refuse an asynchronous schedule for a model whose stages share parameters.

    Raises:
        SpecError: names the first shared parameter.
    """
    if spec.schedule in ASYNCHRONOUS and spec.stages > 1 and model.ties.all:
        unit, name = model.ties.all[0].places[0]
        raise SpecError(
            "spec.pipeline.schedule",
            f"{model.unit_name(unit)}.{name} is shared by several stages. With {spec.schedule} each stage updates its"
            " weights without waiting for the others, so they cannot sum the gradients of a shared parameter: untie it,"
            " or use a schedule that empties the pipeline at each step, such as OneForwardOneBackward",
        )


def check_model(model: PipelineModel) -> None:
    """Refuse a model without trainable parameters, with complex parameters, with sparse tensors, or with modules that
    keep state beside tensors or depend on the layout.

    The output or gradient of a module that depends on the layout changes with the other samples of a micro-batch, or
    with the worker.

    Raises:
        SpecError: names the first such module or parameter.
    """
    if not any(True for unit in model.units for _ in unit.parameters()):
        raise SpecError("spec.model", "has no parameter that requires a gradient: there is nothing to train")
    for index, unit in enumerate(model.units):
        for name, parameter in unit.named_parameters():
            if parameter.is_complex():
                raise SpecError(
                    "spec.model",
                    f"{model.unit_name(index)}.{name} is a complex parameter, which is not supported: store real and "
                    "imaginary parts in a real parameter, and join them by torch.view_as_complex in the forward",
                )
        for name, tensor in (*unit.named_parameters(), *unit.named_buffers()):
            if tensor.layout is not torch.strided:
                raise SpecError(
                    "spec.model",
                    f"{model.unit_name(index)}.{name} is a sparse tensor, which is not supported: store its indices and"
                    " values in two buffers, and join them by torch.sparse_coo_tensor in the forward",
                )
        for name, module in unit.named_modules():
            if complaint := _complaint(module):
                path = ".".join(filter(None, (model.unit_name(index), name)))
                raise SpecError("spec.model", f"{path} is a {type(module).__name__}{complaint}")


def _complaint(module: nn.Module) -> str:
    """Why a module cannot be trained, as words that follow its class name; empty if it can."""
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        return " with state beside its tensors (get_extra_state), which cannot move between workers: keep it in buffers"
    match module:
        case torch.jit.ScriptModule():
            return ", which workers cannot take apart: pass the module from which torch.jit made it"
        case _NormBase() if isinstance(module, _BatchNorm) or module.track_running_stats:
            return (
                ", whose statistics would depend on the layout: use LayerNorm or GroupNorm, or a module that computes "
                "with constant statistics, such as by functional.batch_norm(..., training=False)"
            )
        case nn.TransformerEncoderLayer() | nn.TransformerDecoderLayer() if not module.self_attn.batch_first:
            return (
                " that expects positions first, but samples come first in all activations: "
                "create it with batch_first=True"
            )
        case nn.RNNBase() if module.dropout and module.num_layers > 1:
            return (
                " with dropout, whose draws would depend on the layout: set dropout=0, or use one module per layer "
                "with Dropout between them"
            )
        case nn.MultiheadAttention() if module.dropout and not is_keyed(module):
            return (
                " with dropout, whose draws would depend on the layout: use nn.MultiheadAttention itself, or set "
                "dropout=0"
            )
        case nn.Embedding() | nn.EmbeddingBag() if module.scale_grad_by_freq:
            return " with scale_grad_by_freq, whose gradient would depend on the layout: remove the option"
        case nn.Embedding() | nn.EmbeddingBag() if module.max_norm is not None:
            return (
                " with max_norm, which changes the weight in each forward, and their number depends on the layout: "
                "remove the option"
            )
        case nn.RReLU() | nn.FractionalMaxPool2d() | nn.FractionalMaxPool3d():  # use the process's random generator
            return ", whose draws would depend on the layout"
        case _DropoutNd():
            return ", whose draws would depend on the layout: use Dropout"
    return ""
