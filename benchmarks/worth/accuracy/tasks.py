"""The tasks, at a growing distance from the pretraining, and their models.

- near: scikit-learn's digits, from a ViT that learned MNIST's digits at 8x8 (the demo's).
- brown: the genre of 16 tokens of the Brown corpus, from all-MiniLM-L6-v2, a real BERT.
- far: Fashion-MNIST, from a ViT that learned MNIST's digits.

A seed draws the training samples, their order and the head; the near task keeps the head that knows MNIST's digits.
The held-out samples are the same for all seeds.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks.worth import data
from pipetransformer import (
    DataInfo,
    Dataset,
    LearningRateSchedule,
    Model,
    Optimizer,
    PipelineModel,
    Training,
    train,
)
from pipetransformer.data import Task as Learns
from pipetransformer.data.dataset import TensorSplit
from pipetransformer.models import build_model
from tests.testkit import ROOT

from .lora import adapt

#: The demo's pretrained model, which `make pretrained` makes.
VIT_MNIST8 = ROOT / "examples" / "pretrained" / "vit-mnist8"
_CLOTHES_MODEL = Model(name="vit", num_layers=12, hidden_size=64, num_heads=4, mlp_size=128, patch_size=14)
_PRETRAIN_EPOCHS, _PRETRAIN_BATCH, _PRETRAIN_RATE = 3, 64, 1e-3
_HELD_OUT_CLOTHES = 2000
_HELD_OUT_DIGITS = 797
#: Tokens of a sample of the Brown corpus, with those of its start and end.
_TOKENS = 16
#: Words that surely give as many tokens.
_WORDS = 16
_PARAGRAPHS_OF_A_DOCUMENT = 4
#: Of each genre's documents, every so many is held out.
_HELD_OUT_EVERY = 3


@dataclass(frozen=True)
class Samples:
    """All samples of a task, of which a seed draws some to train on.

    Attributes:
        inputs: (samples, ...), float images or token ids.
        targets: (samples,) classes.
        held_out: (samples,) whether a sample is never trained on.
        info: what the model must know of them.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    held_out: NDArray[np.bool_]
    info: DataInfo

    def drawn(self, seed: int, count: int) -> Dataset:
        """`count` samples to train on, and all that are held out."""
        free = np.flatnonzero(~self.held_out)
        train_on = np.sort(np.random.default_rng([seed, count]).choice(free, count, replace=False))
        return Dataset(self._split(train_on), self._split(np.flatnonzero(self.held_out)), self.info)

    def _split(self, ids: NDArray[np.int64]) -> TensorSplit:
        return TensorSplit(self.inputs[ids], self.targets[ids])


@dataclass(frozen=True)
class Task:
    """A pretrained model to fine-tune.

    Attributes:
        name: in the results' keys.
        model: the model's spec.
        weights: file of pretrained weights by whole-model name, for the built-in `vit`; otherwise the spec has them.
        samples: makes the samples; slow.
        count: training samples that a seed draws.
        epochs: epochs of the whole run.
        batch: samples of a step.
        learning_rate: its peak. Warm-up and fall follow the length of a run.
    """

    name: str
    model: Model
    weights: Callable[[], Path] | None
    samples: Callable[[], Samples]
    count: int
    epochs: int
    batch: int
    learning_rate: float

    @property
    def whole_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * -(-self.count // self.batch)

    def training(self, seed: int, share: float, rate: float = 1.0) -> Training:
        """Training for `share` of the steps, at `rate` times the task's learning rate, whose fall fits that length."""
        steps = round(share * self.whole_steps)
        return Training(
            steps=steps,
            global_batch_size=self.batch,
            optimizer=Optimizer(learning_rate=rate * self.learning_rate, weight_decay=0.01),
            learning_rate_schedule=LearningRateSchedule(shape="Cosine", warmup_steps=round(0.06 * steps)),
            max_gradient_norm=1.0,
            seed=seed,
        )

    def weights_file(self) -> Path:
        """The pretrained weights."""
        return Path(self.model.path) / "model.safetensors" if self.weights is None else self.weights()

    def build(self, seed: int, *, adapters: bool = False) -> PipelineModel:
        """The pretrained model. The seed draws the head if the pretrained weights have none for these classes."""
        model = build_model(self.model, self.samples().info, seed=seed, dtype=torch.float32)
        if self.weights is not None:
            known = load_file(self.weights())
            for index, unit in enumerate(model.units[:-1]):
                prefix = f"{model.unit_name(index)}."
                unit.load_state_dict({n.removeprefix(prefix): t for n, t in known.items() if n.startswith(prefix)})
        if adapters:
            adapt(model.blocks)
        return model


@cache
def digits() -> Samples:
    """1,797 digits of 8x8 as the trainer's own `digits` scales them."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    inputs = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    held_out = np.zeros(len(classes), dtype=bool)
    held_out[np.random.default_rng(0).permutation(len(classes))[:_HELD_OUT_DIGITS]] = True
    return Samples(inputs, torch.as_tensor(classes, dtype=torch.long), held_out, DataInfo((1, 8, 8), 10))


@cache
def clothes() -> Samples:
    """Fashion-MNIST: its 60,000 training pictures, and the first 2,000 of its test pictures."""
    known, unknown = data.fashion_mnist()
    pixels = np.concatenate([known.pixels, unknown.pixels[:_HELD_OUT_CLOTHES]])
    classes = np.concatenate([known.classes, unknown.classes[:_HELD_OUT_CLOTHES]])
    held_out = np.arange(len(classes)) >= len(known.classes)
    return Samples(scaled(pixels), torch.as_tensor(classes, dtype=torch.long), held_out, DataInfo((1, 28, 28), 10))


@cache
def genres() -> Samples:
    """Four passages of each document of the Brown corpus. A document is trained on or held out, never both."""
    from transformers import AutoTokenizer

    labels = sorted({document.genre for document in data.brown()})
    texts, targets, held_out = [], [], []
    seen = dict.fromkeys(labels, 0)
    for document in data.brown():
        starts = np.linspace(0, len(document.words) - _WORDS, _PARAGRAPHS_OF_A_DOCUMENT).astype(int)
        texts += [" ".join(document.words[start : start + _WORDS]) for start in starts]
        targets += [labels.index(document.genre)] * len(starts)
        held_out += [seen[document.genre] % _HELD_OUT_EVERY == 0] * len(starts)
        seen[document.genre] += 1
    tokenizer = AutoTokenizer.from_pretrained(data.minilm())
    encoded = tokenizer(texts, truncation=True, max_length=_TOKENS, padding="max_length", return_tensors="pt")
    info = DataInfo(
        (_TOKENS,), len(labels), len(tokenizer), task=Learns.CLASS, labels=tuple(labels), pad_id=tokenizer.pad_token_id
    )
    return Samples(encoded["input_ids"], torch.as_tensor(targets), np.asarray(held_out), info)


def scaled(pixels: NDArray[np.uint8]) -> torch.Tensor:
    """Grey images (samples, height, width) as (samples, 1, height, width) from -1 to 1."""
    return torch.tensor(pixels[:, None], dtype=torch.float32) / 127.5 - 1


def pretrained(model: Model, images: Callable[[], tuple[data.Images, data.Images]], name: str) -> Path:
    """Weights of `model` after it learned `images`; trained once and kept in the cache folder."""
    said = f"{model.model_dump_json()} {_PRETRAIN_EPOCHS} {_PRETRAIN_BATCH} {_PRETRAIN_RATE}"
    folder = data.folder() / f"{name}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"
    weights = folder / "model" / "model.safetensors"
    if not weights.is_file():
        known, unknown = images()
        splits = [
            TensorSplit(scaled(one.pixels), torch.tensor(one.classes, dtype=torch.long)) for one in (known, unknown)
        ]
        training = Training(
            epochs=_PRETRAIN_EPOCHS,
            global_batch_size=_PRETRAIN_BATCH,
            optimizer=Optimizer(learning_rate=_PRETRAIN_RATE, weight_decay=0.01),
            learning_rate_schedule=LearningRateSchedule(shape="Cosine", warmup_steps=100),
            max_gradient_norm=1.0,
        )
        dataset = Dataset(splits[0], splits[1], DataInfo((1, *known.pixels.shape[1:]), 10))
        print(f"pretraining {name} ...", flush=True)
        done = train(model=model, data=dataset, training=training, run_dir=folder)
        print(f"pretraining {name}: accuracy {done.metrics['accuracy']:.2%} of held-out images", flush=True)
    return weights


def _digits_of_28() -> Path:
    return pretrained(_CLOTHES_MODEL, data.mnist, "vit-mnist28")


NEAR = Task("near", Model(name="huggingface", path=str(VIT_MNIST8), num_layers=12), None, digits, 320, 10, 32, 5e-4)
FAR = Task("far", _CLOTHES_MODEL, _digits_of_28, clothes, 1000, 8, 50, 1e-3)


def brown_task() -> Task:
    """Needs the pretrained BERT to be there, so it is made when it is asked for. Raises the errors of `data.fetch`."""
    model = Model(name="huggingface", path=str(data.minilm()), num_layers=6)
    return Task("brown", model, None, genres, 384, 4, 24, 2e-4)


def slow(task: Task, rate: float) -> Task:
    """The task with a learning rate so small that each epoch is needed: where stopping early should cost most."""
    return replace(task, name=f"{task.name}_slow", learning_rate=rate * task.learning_rate)
