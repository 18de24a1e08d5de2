"""Reads a trained model back and scores it on the held-out split: `python -m pipetransformer.predict MODEL_DIR`."""

import argparse
import json

import torch

from .checkpoint import load_config, load_model
from .data import Split, lengths_of, load_dataset
from .metrics import accuracy_of
from .models import MicroBatchContext, PipelineModel, set_micro_batch

_BATCH = 256


def accuracy(model: PipelineModel, split: Split) -> float:
    """Share of the split's targets that the model gets right."""
    metric = accuracy_of(model)
    correct = weight = 0.0
    with torch.no_grad():
        for start in range(0, len(split), _BATCH):
            ids = range(start, min(start + _BATCH, len(split)))
            inputs, targets = split.batch(ids)
            set_micro_batch(MicroBatchContext(0, ids, lengths_of(split, ids, inputs.device)))
            for unit in model.units:
                inputs = unit(inputs)
            ones = torch.ones(len(targets))
            right, of = metric(inputs, targets, ones)
            correct += float(right)
            weight += float(of)
    return correct / weight


def main() -> None:
    """Print one JSON line: the number of test samples and the share that the model gets right."""
    parser = argparse.ArgumentParser(prog="pipetransformer.predict", description=__doc__)
    parser.add_argument("model_dir", help="folder or fsspec URL that holds a finished model")
    location = parser.parse_args().model_dir
    config = load_config(location)
    dataset = load_dataset(config.data, dtype=config.dtype)
    print(json.dumps({"samples": len(dataset.test), "accuracy": accuracy(load_model(location), dataset.test)}))


if __name__ == "__main__":
    main()
