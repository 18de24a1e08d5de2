"""The command `python -m pipetransformer predict FOLDER`, which runs a finished model.

It evaluates the held-out split and prints one JSON line: `{"samples": 364, "accuracy": 0.97}`. With
`--inputs FILE` it prints a line for each sample instead: `{"class": 3, "label": "cat", "score": 0.98}`.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipetransformer import storage
from pipetransformer.data import Split, Task, lengths_of, load_dataset
from pipetransformer.errors import SpecError
from pipetransformer.models import MicroBatchContext, PipelineModel, run_unit
from pipetransformer.models.metrics import accuracy_of
from pipetransformer.storage import Kind, ModelConfig, load_config
from pipetransformer_contract.spec import SCRIPT

from .finished_model import MAX_BATCH, Prediction, load_model, prediction_of

#: Positions of samples in one forward, at most. A language model has an output of its whole vocabulary for each.
_POSITIONS = 2048


def _batch_size(positions: int) -> int:
    """Number of samples in one forward, if each sample has this many positions."""
    return max(1, min(MAX_BATCH, _POSITIONS // positions))


def accuracy(model: PipelineModel, split: Split) -> float:
    """Share of the split's targets that the model predicts correctly."""
    metric = accuracy_of(model)
    size = _batch_size(math.prod(model.activation[:-1]))
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
    size = _batch_size(math.prod(inputs.shape[1:]) if config.vocab_size else 1)
    lines = []
    for start in range(0, len(inputs), size):
        part = slice(start, start + size)
        found = _predict_batch(model, config, inputs[part], None if lengths is None else lengths[part])
        labels: Sequence[str | None] = found.labels or [None] * len(found.classes)
        lines += [
            {"class": number, **({} if label is None else {"label": label}), "score": score}
            for number, label, score in zip(found.classes.tolist(), labels, found.scores.tolist(), strict=True)
        ]
    return lines


def _predict_batch(model: Any, config: ModelConfig, inputs: Tensor, lengths: Tensor | None) -> Prediction:
    """The prediction for some inputs, in one forward of what `load_model` returned."""
    if config.kind is not Kind.TRANSFORMERS:
        prediction: Prediction = model.predict(inputs, lengths)
        return prediction
    mask = {} if lengths is None else {"attention_mask": torch.arange(inputs.shape[1]) < lengths[:, None]}
    with torch.no_grad():
        outputs = model(inputs.to(config.torch_dtype) if inputs.is_floating_point() else inputs, **mask).logits
    return prediction_of(outputs, config.labels)


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
