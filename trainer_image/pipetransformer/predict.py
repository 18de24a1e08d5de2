"""Reads a trained model back and scores it on the held-out split: `python -m pipetransformer.predict MODEL_DIR`."""

import argparse
import json

import torch

from .checkpoint import load_config, load_model
from .data import Split, load_dataset
from .models import PipelineModel

_BATCH = 256


def accuracy(model: PipelineModel, split: Split) -> float:
    """Share of the split's samples that the model gets right."""
    correct = 0.0
    with torch.no_grad():
        for start in range(0, len(split), _BATCH):
            inputs, targets = split.batch(range(start, min(start + _BATCH, len(split))))
            for unit in model.units:
                inputs = unit(inputs)
            correct += model.correct(inputs, targets, torch.ones(len(targets))).item()
    return correct / len(split)


def main() -> None:
    """Print one JSON line: the number of test samples and the share that the model gets right."""
    parser = argparse.ArgumentParser(prog="pipetransformer.predict", description=__doc__)
    parser.add_argument("model_dir", help="folder or fsspec URL that holds model.safetensors and config.json")
    location = parser.parse_args().model_dir
    config = load_config(location)
    dataset = load_dataset(config.data, dtype=config.dtype)
    print(json.dumps({"samples": len(dataset.test), "accuracy": accuracy(load_model(location), dataset.test)}))


if __name__ == "__main__":
    main()
