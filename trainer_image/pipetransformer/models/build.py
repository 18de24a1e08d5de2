"""Builds a model from its spec, the same weights on every worker and whatever part of it a worker asks for."""

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
from .randomness.dropout import key
from .randomness.keyed import with_keyed_dropout
from .randomness.seeded import seeded

#: Models that are not imported.
VIT, HUGGINGFACE = "vit", "huggingface"


def build_model(
    spec: Model, info: DataInfo, *, seed: int, dtype: torch.dtype, units: Collection[int] | None = None
) -> PipelineModel:
    """The model with the weights that it starts from, on the CPU.

    Args:
        spec: which model, and how large.
        info: shape of the samples and number of classes.
        seed: the same seed gives the same weights, unit by unit.
        dtype: of all floating-point parameters.
        units: the only units to give memory to; the others stay on the meta device. All by default.

    Raises:
        SpecError: the model is unknown, does not import, or does not fit the data.
    """
    if spec.name == HUGGINGFACE:
        model: PipelineModel = import_huggingface().skeleton(spec, info, seed=seed, dtype=dtype)
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
    """Units by index (0 is the embedding, L+1 the head), no two of them with a parameter in common, on the CPU.

    Args and errors are those of `build_model`, which gives them the same weights.
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
        vit.initialise(units[index], torch.Generator().manual_seed(key(seed, index)))
    return units


def check_model_spec(spec: Model, *, task: Task | None = None, of_bytes: bool = False) -> Task | None:
    """Refuse what is wrong whatever the data hold, before they are read.

    Args:
        spec: of the model.
        task: what samples will ask for; None where only the data tell it.
        of_bytes: whether samples will be bytes.

    Returns:
        What the model learns; None where nobody says it.

    Raises:
        SpecError: the model is unknown, does not import, has other options or another architecture than it says, or
            learns something else.
    """
    if spec.name == HUGGINGFACE:
        learns: Task = import_huggingface().check_before_data(spec, task, of_bytes=of_bytes)
        return learns
    if spec.name not in (VIT, SCRIPT):
        import_function(spec.name, field="spec.model.name")
    return None


def import_huggingface() -> ModuleType:
    """Only where a job asks for it: transformers takes seconds to import and is an extra.

    Raises:
        SpecError: transformers is not in the trainer's image.
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
            message = f"is {spec.num_layers}, but {spec.name} has {model.num_layers} blocks"
            raise SpecError("spec.model.numLayers", message)
        for unit in model.units:
            cast(unit, dtype)
        return with_keyed_dropout(model, seed=seed)


def _copying(spec: Model) -> AbstractContextManager[None]:
    return building("spec.model.name", f"what {spec.name} returned cannot be copied")
