"""Loads a finished model in Python: the public `load_model`, and what a loaded model predicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer import storage
from pipetransformer.models import MicroBatchContext, ModelFunction, PipelineModel, import_huggingface, run_unit
from pipetransformer.storage import Kind, ModelConfig, load_config

#: Samples in one forward, at most.
MAX_BATCH = 256


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

    def predict(self, inputs: Tensor, lengths: Tensor | None = None, *, batch_size: int = MAX_BATCH) -> Prediction:
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
        return prediction_of(torch.cat(parts), self.config.labels)


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


def prediction_of(outputs: Tensor, labels: Sequence[str]) -> Prediction:
    """The prediction for outputs (samples, ..., classes). `labels` are the names of the classes, if they have any."""
    scores, classes = outputs.softmax(dim=-1).max(dim=-1)
    named = [labels[each] for each in classes.tolist()] if labels and classes.dim() == 1 else []
    return Prediction(outputs, classes, scores, named)
