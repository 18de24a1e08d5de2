"""Builds a model, or some of its units, from the job's spec. All workers get the same initial weights."""

import copy
from collections.abc import Collection
from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch import nn

from pipetransformer.data import DataInfo, Task
from pipetransformer.errors import SpecError, building
from pipetransformer.user_code import import_function
from pipetransformer_contract.spec import SCRIPT, Model

from . import vit
from .dtype import cast
from .model import PipelineModel
from .randomness.dropout import derive_seed
from .randomness.keyed import with_keyed_dropout
from .randomness.seeded import seeded

#: Names of models in the spec that are not imported as `module:function`.
VIT, HUGGINGFACE = "vit", "huggingface"


def build_model(
    spec: Model, info: DataInfo, *, seed: int, dtype: torch.dtype, units: Collection[int] | None = None
) -> PipelineModel:
    """The model with its initial weights, on the CPU.

    Args:
        spec: says which model, and how large.
        info: shape of the samples and number of classes.
        seed: the same seed gives the same weights, whichever units are built.
        dtype: type of all floating-point parameters.
        units: units to allocate, by index; the others stay on the meta device. None allocates all.

    Raises:
        SpecError: the model is unknown, does not import, or does not fit the data.
    """
    if spec.name == HUGGINGFACE:
        model: PipelineModel = import_huggingface().shell(spec, info, seed=seed, dtype=dtype)
    elif spec.name == VIT:
        empty = [vit.build_empty_unit(spec, info, i, seed=seed, dtype=dtype) for i in range(spec.num_layers + 2)]
        model = PipelineModel(empty[0], empty[1:-1], empty[-1], (vit.num_tokens(spec, info), spec.hidden_size))
    else:
        whole = _imported(spec, info, seed=seed, dtype=dtype)
        with _copying(spec):
            model = whole.shell()
    wanted = range(spec.num_layers + 2) if units is None else units
    return model.with_units(build_units(spec, info, wanted, seed=seed, dtype=dtype)) if wanted else model


def build_units(
    spec: Model, info: DataInfo, indices: Collection[int], *, seed: int, dtype: torch.dtype
) -> dict[int, nn.Module]:
    """Build units by index (0 is the embedding, L + 1 the head), on the CPU. No two of them share memory.

    Their weights are those of `build_model`.

    Args:
        spec: says which model, and how large.
        info: shape of the samples and number of classes.
        indices: indices of the units.
        seed: the same seed gives the same weights.
        dtype: type of all floating-point parameters.

    Raises:
        SpecError: the model is unknown, does not import, or does not fit the data.
    """
    if spec.name == HUGGINGFACE:
        built: dict[int, nn.Module] = import_huggingface().build_units(spec, info, indices, seed=seed, dtype=dtype)
        return built
    if spec.name != VIT:
        model = _imported(spec, info, seed=seed, dtype=dtype)
        with _copying(spec):
            return {index: copy.deepcopy(model.units[index]) for index in indices}
    units = {}
    for index in indices:
        units[index] = vit.build_empty_unit(spec, info, index, seed=seed, dtype=dtype).to_empty(device="cpu")
        vit.initialise(units[index], torch.Generator().manual_seed(derive_seed(seed, index)))
    return units


def check_model_spec(spec: Model, *, task: Task | None, of_bytes: bool) -> Task | None:
    """Check what can be checked about the model before the data are read.

    Args:
        spec: the model's part of the spec.
        task: the task that the samples are for; None if it is not known before the data are read.
        of_bytes: whether the tokens of samples are bytes.

    Returns:
        The task that the model learns; None if the spec does not say it.

    Raises:
        SpecError: the model is unknown or cannot be imported, an option or the architecture does not fit it, or it
            learns another task.
    """
    if spec.name == VIT and spec.options:
        raise SpecError("spec.model.options", "are for other models: vit has fields, such as hiddenSize")
    if spec.name == HUGGINGFACE:
        learns: Task = import_huggingface().check_before_data(spec, task, of_bytes=of_bytes)
        return learns
    if spec.name not in (VIT, SCRIPT):
        import_function(spec.name, field="spec.model.name")
    return None


def name_of(spec: Model) -> str:
    """The model's name for messages to the user."""
    if spec.name == HUGGINGFACE:
        name: str = import_huggingface().class_name(spec)
        return name
    return "the program's model" if spec.name == SCRIPT else spec.name


def import_huggingface() -> ModuleType:
    """Import `models.huggingface`. Call it only if a job needs it: transformers is an extra, and slow to import.

    Raises:
        SpecError: transformers is not installed.
    """
    try:
        from . import huggingface
    except ImportError as error:
        raise SpecError(
            "spec.model.name", f"huggingface needs transformers: pip install pipetransformer[huggingface] ({error})"
        ) from error
    return huggingface


def _imported(spec: Model, info: DataInfo, *, seed: int, dtype: torch.dtype) -> PipelineModel:
    function = import_function(spec.name, field="spec.model.name")
    with seeded(seed), building("spec.model.options", f"{spec.name} failed"):
        model = function(info, **spec.options)
        if not isinstance(model, PipelineModel):
            raise SpecError("spec.model.name", f"{spec.name} returned {type(model).__name__}, not a PipelineModel")
        if model.num_layers != spec.num_layers:
            message = f"is {spec.num_layers}, but {spec.name} has {model.num_layers} layers"
            raise SpecError("spec.model.numLayers", message)
        for unit in model.units:
            cast(unit, dtype)
        return with_keyed_dropout(model, seed=seed)


def _copying(spec: Model) -> AbstractContextManager[None]:
    return building("spec.model.name", f"the model that {spec.name} returned cannot be copied")
