"""Builds a model from its spec, the same weights on every worker and whatever part of it a worker asks for."""

from collections.abc import Collection
from types import ModuleType

import torch
from torch import nn

from pipetransformer_contract.spec import Model

from ..data import DataInfo
from ..errors import SpecError
from ..imports import import_function
from . import vit
from .dropout import key
from .model import PipelineModel

#: Name of the models of transformers.
HUGGINGFACE = "huggingface"


def build_model(
    spec: Model, info: DataInfo, *, seed: int, dtype: torch.dtype, units: Collection[int] | None = None
) -> PipelineModel:
    """The model with freshly initialised weights on the CPU.

    Args:
        spec: which model, and how large.
        info: shape of the samples and number of classes.
        seed: the same seed gives the same weights, unit by unit.
        dtype: of all floating-point parameters.
        units: the only units to give memory to; the others stay on the meta device. All by default.

    Raises:
        SpecError: the model is unknown, does not import, or does not fit the data.
    """
    wanted = range(spec.num_layers + 2) if units is None else units
    if spec.name == HUGGINGFACE:
        huggingface = import_huggingface()
        model: PipelineModel = huggingface.skeleton(spec, info, seed=seed, dtype=dtype)
        return model.with_units(huggingface.build_units(spec, info, wanted, seed=seed, dtype=dtype))
    if spec.name != "vit":
        return _imported(spec, info, seed=seed, dtype=dtype, units=units)
    built = [
        build_unit(spec, info, index, seed=seed, dtype=dtype)
        if index in wanted
        else vit.build_empty_unit(spec, info, index, seed=seed, dtype=dtype)
        for index in range(spec.num_layers + 2)
    ]
    return PipelineModel(built[0], built[1:-1], built[-1], (vit.num_tokens(spec, info), spec.hidden_size))


def build_unit(spec: Model, info: DataInfo, index: int, *, seed: int, dtype: torch.dtype) -> nn.Module:
    """Unit `index` (0 is the embedding, L+1 the head) with the weights that `build_model` would give it.

    Raises:
        SpecError: as `build_model` does.
    """
    if spec.name == HUGGINGFACE:
        built: nn.Module = import_huggingface().build_units(spec, info, [index], seed=seed, dtype=dtype)[index]
        return built
    if spec.name != "vit":
        return _imported(spec, info, seed=seed, dtype=dtype, units=[index]).units[index]
    unit = vit.build_empty_unit(spec, info, index, seed=seed, dtype=dtype).to_empty(device="cpu")
    vit.initialise(unit, torch.Generator().manual_seed(key(seed, index)))
    return unit


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


def _imported(
    spec: Model, info: DataInfo, *, seed: int, dtype: torch.dtype, units: Collection[int] | None
) -> PipelineModel:
    function = import_function(spec.name, field="spec.model.name")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = function(info, **spec.options)
        except Exception as error:
            raise SpecError("spec.model.options", f"{spec.name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, PipelineModel):
        raise SpecError("spec.model.name", f"{spec.name} returned {type(model).__name__}, not a PipelineModel")
    if model.num_layers != spec.num_layers:
        raise SpecError("spec.model.numLayers", f"is {spec.num_layers}, but {spec.name} has {model.num_layers} blocks")
    for index, unit in enumerate(model.units):
        unit.to(dtype)
        if units is not None and index not in units:
            unit.to("meta")
    return model
