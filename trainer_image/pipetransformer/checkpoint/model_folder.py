"""The finished model, beside the spec that rebuilds the network.

Our own networks and imported ones are one file of weights by whole-model name; a model of transformers is the folder
that its `from_pretrained` reads.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor

from pipetransformer_contract.spec import Data, Model, Precision, TrainerSpec

from ..data import DataInfo
from ..models import HUGGINGFACE, PipelineModel, build_model, import_huggingface
from .files import Folder
from .store import from_bytes, to_bytes

WEIGHTS = "model.safetensors"
CONFIG = "pipetransformer.json"


class ModelConfig(BaseModel):
    """What `pipetransformer.json` says."""

    model: Model
    data: Data
    input_shape: tuple[int, ...]
    num_classes: int
    vocab_size: int
    precision: Precision

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision is Precision.FLOAT64 else torch.float32

    @property
    def info(self) -> DataInfo:
        return DataInfo(self.input_shape, self.num_classes, self.vocab_size)


def write_model(location: str, tensors: Mapping[str, Tensor], *, spec: TrainerSpec, info: DataInfo) -> None:
    """Write the weights and, after them, `pipetransformer.json` into a folder (a path or an fsspec URL).

    Args:
        location: the folder, made if needed.
        tensors: parameters and buffers by whole-model name, such as `blocks.3.attn.qkv.weight`.
        spec: the job's spec.
        info: of the training data.
    """
    folder = Folder(location)
    if spec.model.name == HUGGINGFACE:
        dtype = next(iter(tensors.values())).dtype
        with tempfile.TemporaryDirectory() as scratch:
            import_huggingface().save_pretrained(spec.model, info, tensors, Path(scratch), dtype=dtype)
            for file in sorted(Path(scratch).iterdir()):
                folder.write(file.name, file.read_bytes())
    else:
        folder.write(WEIGHTS, to_bytes(tensors, {"format": "pt"}))
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
    if config.model.name == HUGGINGFACE:
        return _load_pretrained(location, config)
    model = build_model(config.model, config.info, seed=0, dtype=config.dtype)
    weights = from_bytes(Folder(location).read(WEIGHTS))
    for index, unit in enumerate(model.units):
        prefix = model.unit_name(index) + "."
        unit.load_state_dict({name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)})
        unit.eval()
    return model


def _load_pretrained(location: str, config: ModelConfig) -> PipelineModel:
    folder = Folder(location)
    with tempfile.TemporaryDirectory() as scratch:
        for name in folder.names():
            (Path(scratch) / name).write_bytes(folder.read(name))
        model: PipelineModel = import_huggingface().load_pretrained(
            config.model, config.info, Path(scratch), dtype=config.dtype
        )
    for unit in model.units:
        unit.eval()
    return model
