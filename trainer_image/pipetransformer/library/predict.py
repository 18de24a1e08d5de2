"""Loads a finished model: `load_model` in Python, `python -m pipetransformer predict FOLDER` in a shell.

The command evaluates the held-out split and prints one JSON line: `{"samples": 364, "accuracy": 0.97}`. With
`--inputs FILE` it prints a line for each sample instead: `{"class": 3, "label": "cat", "score": 0.98}`.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipetransformer import storage
from pipetransformer.data import Split, Task, lengths_of, load_dataset
from pipetransformer.errors import SpecError
from pipetransformer.models import MicroBatchContext, ModelFunction, PipelineModel, import_huggingface, run_unit
from pipetransformer.models.metrics import accuracy_of
from pipetransformer.storage import Kind, ModelConfig, load_config
from pipetransformer_contract.spec import SCRIPT

#: Samples in one forward, at most.
_BATCH = 256
#: Positions of samples in one forward, at most. A language model has an output of its whole vocabulary for each.
_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's predictions for some samples.

    Attributes:
        outputs: (samples, ..., classes) outputs of the head, such as logits.
        classes: (samples, ...) index of the largest output.
        scores: (samples, ...) softmax of the largest output.
        labels: name of each sample's class; empty if classes have no names, or if a sample has several classes.
    """

    outputs: Tensor
    classes: Tensor
    scores: Tensor
    labels: Sequence[str]


class TrainedModel(nn.Module):
    """A finished model that is not a class of the library transformers, in evaluation mode on the CPU.

    Its modules are `embedding`, `blocks` (the layers) and `head`. So `state_dict()` has the same names as the file
    `model.safetensors`.

    Attributes:
        config: the contents of `pipetransformer.json`, such as `labels`, `dtype` and `input_shape`.
    """

    def __init__(self, model: PipelineModel, config: ModelConfig) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = model.embedding, nn.ModuleList(model.blocks), model.head
        self.config = config
        self.eval()

    def forward(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Run the model, and return the head's outputs (samples, ..., classes).

        Args:
            inputs: (samples, *input_shape), scaled like the training data; floating inputs are cast to the weights'
                type.
            lengths: (samples,) number of leading positions that are not padding; None without padding.
        """
        x = inputs.to(next(self.parameters()).dtype) if inputs.is_floating_point() else inputs
        context = MicroBatchContext(0, range(len(x)), lengths)
        for unit in (self.embedding, *self.blocks, self.head):
            x = run_unit(unit, x, context)
        return x

    def predict(self, inputs: Tensor, lengths: Tensor | None = None, *, batch_size: int = _BATCH) -> Prediction:
        """Run the model without gradients, and return outputs, classes and the names of the classes.

        Args:
            inputs: as in `forward`.
            lengths: as in `forward`.
            batch_size: samples in one forward.

        Raises:
            ValueError: the inputs have the wrong shape.
        """
        wanted = self.config.input_shape
        if tuple(inputs.shape[1:]) != wanted and not self.config.vocab_size:  # tokens may be fewer
            raise ValueError(f"inputs have shape {tuple(inputs.shape)}, not (samples, {', '.join(map(str, wanted))})")
        with torch.no_grad():
            parts = [
                self(
                    inputs[start : start + batch_size], None if lengths is None else lengths[start : start + batch_size]
                )
                for start in range(0, len(inputs), batch_size)
            ]
        return _prediction(torch.cat(parts), self.config.labels)


def load_model(location: str | Path, *, model: ModelFunction | None = None) -> Any:
    """Load a finished model, in evaluation mode on the CPU.

    Args:
        location: path or fsspec URL of a run's folder `model`.
        model: the function that was passed to `train`. It is needed only if the folder does not name it, as for a
            lambda, or if its module cannot be imported here.

    Returns:
        A model of the library transformers if the job's model is `huggingface`; otherwise a `TrainedModel`.

    Raises:
        FileNotFoundError: the folder holds no model.
        SpecError: the network cannot be built on this machine.
        RuntimeError: the weights do not fit the network.
    """
    folder = str(location)
    config = load_config(folder)
    if config.kind is not Kind.TRANSFORMERS:
        return TrainedModel(storage.load_model(folder, model), config)
    with storage.local_copy(folder) as files:
        return import_huggingface().load_trained(config.model, files, dtype=config.torch_dtype)


def accuracy(model: PipelineModel, split: Split) -> float:
    """Share of the split's targets that the model predicts correctly."""
    metric = accuracy_of(model)
    size = max(1, min(_BATCH, _POSITIONS // math.prod(model.activation[:-1])))
    correct = weight = 0.0
    with torch.no_grad():
        for start in range(0, len(split), size):
            ids = range(start, min(start + size, len(split)))
            inputs, targets = split.batch(ids)
            context = MicroBatchContext(0, ids, lengths_of(split, ids, inputs.device))
            for unit in model.units:
                inputs = run_unit(unit, inputs, context)
            ones = torch.ones(len(targets))
            right, of = metric(inputs, targets, ones)
            correct += float(right)
            weight += float(of)
    return correct / weight


def _prediction(outputs: Tensor, labels: Sequence[str]) -> Prediction:
    scores, classes = outputs.softmax(dim=-1).max(dim=-1)
    named = [labels[each] for each in classes.tolist()] if labels and classes.dim() == 1 else []
    return Prediction(outputs, classes, scores, named)


def _score(location: str, config: ModelConfig) -> dict[str, float]:
    if config.data.name == SCRIPT:
        raise SpecError("data", "only the training program has the samples: give inputs by --inputs, or evaluate there")
    dataset = load_dataset(config.data, dtype=config.torch_dtype)
    if not len(dataset.test):
        raise SpecError("spec.data", "has no held-out samples: give inputs by --inputs")
    return {"samples": len(dataset.test), "accuracy": accuracy(storage.load_model(location), dataset.test)}


def _lengths(inputs: Tensor, config: ModelConfig) -> Tensor | None:
    """(samples,) number of leading positions that are not padding; None if the model was trained without padding."""
    if config.task not in (None, Task.CLASS) or config.pad_id is None or not config.vocab_size:
        return None
    places = torch.arange(1, inputs.shape[1] + 1)
    return ((inputs != config.pad_id) * places).amax(dim=1).clamp(min=1)


def _predict(location: str, config: ModelConfig, file: str) -> list[dict[str, Any]]:
    inputs = torch.from_numpy(np.load(file, allow_pickle=False))
    model, lengths = load_model(location), _lengths(inputs, config)
    if config.kind is Kind.TRANSFORMERS:
        floating = inputs.is_floating_point()
        mask = {} if lengths is None else {"attention_mask": torch.arange(inputs.shape[1]) < lengths[:, None]}
        with torch.no_grad():
            outputs = model(inputs.to(config.torch_dtype) if floating else inputs, **mask).logits
        found = _prediction(outputs, config.labels)
    else:
        found = model.predict(inputs, lengths)
    labels: Sequence[str | None] = found.labels or [None] * len(inputs)
    return [
        {"class": number, **({} if label is None else {"label": label}), "score": score}
        for number, label, score in zip(found.classes.tolist(), labels, found.scores.tolist(), strict=True)
    ]


def main(given: Sequence[str]) -> None:
    """Print JSON lines: the accuracy on the held-out split, or predictions for some inputs."""
    parser = argparse.ArgumentParser(prog="python -m pipetransformer predict", description=__doc__)
    parser.add_argument("model_dir", help="folder or fsspec URL of a finished model")
    parser.add_argument("--inputs", help="a .npy file of inputs (samples, ...), scaled like the training data")
    arguments = parser.parse_args(given)
    try:
        config = load_config(arguments.model_dir)
        if arguments.inputs is None:
            print(json.dumps(_score(arguments.model_dir, config)))
        else:
            for line in _predict(arguments.model_dir, config, arguments.inputs):
                print(json.dumps(line))
    except (OSError, ValueError) as error:  # a SpecError is a ValueError
        sys.exit(f"pipetransformer predict: {error}")
