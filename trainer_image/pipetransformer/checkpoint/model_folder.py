"""The finished model: weights by whole-model name beside the spec that rebuilds the network."""

import json
from collections.abc import Mapping
from dataclasses import asdict

import safetensors.torch
import torch
from pydantic import BaseModel
from torch import Tensor

from pipetransformer_contract.spec import Data, Model, Precision, TrainerSpec

from ..data import DataInfo
from ..models import PipelineModel, build_model
from .files import Folder

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


class ModelConfig(BaseModel):
    """What `config.json` says."""

    model: Model
    data: Data
    input_shape: tuple[int, ...]
    num_classes: int
    precision: Precision

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision is Precision.FLOAT64 else torch.float32


def write_model(location: str, tensors: Mapping[str, Tensor], *, spec: TrainerSpec, info: DataInfo) -> None:
    """Write `model.safetensors` and, after it, `config.json` into a folder (a path or an fsspec URL).

    Args:
        location: the folder, made if needed.
        tensors: parameters and buffers by whole-model name, such as `blocks.3.attn.qkv.weight`.
        spec: the job's spec.
        info: of the training data.
    """
    folder = Folder(location)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    folder.write(WEIGHTS, safetensors.torch.save(weights, metadata={"format": "pt"}))
    config = {
        "model": spec.model.to_wire(),
        "data": spec.data.to_wire(),
        "precision": spec.training.precision.value,
        **asdict(info),
    }
    folder.write(CONFIG, json.dumps(config, indent=2).encode())


def load_config(location: str) -> ModelConfig:
    """The configuration of a model folder.

    Raises:
        FileNotFoundError: the folder holds no model.
    """
    return ModelConfig.model_validate_json(Folder(location).read(CONFIG))


def load_model(location: str) -> PipelineModel:
    """The trained model, in evaluation mode on the CPU.

    Raises:
        FileNotFoundError: the folder holds no model.
        SpecError: the network cannot be built here.
        RuntimeError: weights and network do not fit.
    """
    config = load_config(location)
    info = DataInfo(config.input_shape, config.num_classes)
    model = build_model(config.model, info, seed=0, dtype=config.dtype)
    weights = safetensors.torch.load(Folder(location).read(WEIGHTS))
    for index, unit in enumerate(model.units):
        prefix = model.unit_name(index) + "."
        unit.load_state_dict({name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)})
        unit.eval()
    return model
