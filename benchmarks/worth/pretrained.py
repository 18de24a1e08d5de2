"""Pretrains the small ViT that `make demo` fine-tunes: `make pretrained` writes it to examples/pretrained/vit-mnist8.

It learns MNIST's 60,000 digits at 8x8. scikit-learn's digits, which the demo trains on, are of other writers and from
another scanner. Each of their pixels is the number of dark pixels in a 4x4 block of a 32x32 bitmap, 0 to 16.
"""

import argparse
import hashlib
import math
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification
from transformers.utils import logging

from benchmarks.worth import data
from tests.testkit import ROOT

FOLDER = ROOT / "examples" / "pretrained" / "vit-mnist8"
EPOCHS, BATCH, LEARNING_RATE, WEIGHT_DECAY, SEED = 4, 128, 2e-3, 0.05, 0
#: Share of the steps in which the learning rate rises.
WARM_UP = 0.1
#: How far a digit is turned (degrees), slanted and stretched at most: other people write differently.
TURN, SLANT, STRETCH = 15.0, 0.3, 0.2
#: How much smaller a digit is drawn, so that it stays within its picture.
_SMALLER = 1.2
#: Grey of MNIST, 0 to 255, from which a pixel counts as dark.
_DARK = 128.0
_BITMAP, _BLOCK = 32, 4
_AT_ONCE = 5000


def reduced(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Reduces a grey digit (height, width), 0 to 255, to numbers of dark pixels (8, 8), 0 to 16.

    The square around the digit becomes a bitmap of 32x32, and each of the bitmap's 4x4 blocks one number.
    """
    rows, columns = np.flatnonzero(pixels.any(axis=1)), np.flatnonzero(pixels.any(axis=0))
    digit = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype(np.float32)
    missing = [max(digit.shape) - side for side in digit.shape]
    square = torch.from_numpy(np.pad(digit, [(side // 2, side - side // 2) for side in missing]))
    bitmap = functional.interpolate(square[None, None], (_BITMAP, _BITMAP), mode="bilinear")[0, 0] >= _DARK
    blocks = bitmap.reshape(_BITMAP // _BLOCK, _BLOCK, _BITMAP // _BLOCK, _BLOCK).sum(dim=(1, 3))
    return blocks.numpy().astype(np.uint8)


def new_model() -> ViTForImageClassification:
    """A ViT of 12 layers and 0.4 million parameters with random weights."""
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=64, num_hidden_layers=12,
        num_attention_heads=4, intermediate_size=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(SEED)
    return ViTForImageClassification(config)


def distorted(pixels: NDArray[np.uint8], generator: torch.Generator) -> NDArray[np.uint8]:
    """Turns, slants and stretches each grey digit (samples, height, width) at random."""
    count = len(pixels)

    def drawn(most: float) -> Tensor:
        return (torch.rand(count, generator=generator) - 0.5) * 2 * most

    turn, slant, stretch = drawn(math.radians(TURN)), drawn(SLANT), 1 + drawn(STRETCH)
    maps = torch.zeros(count, 2, 3)
    maps[:, 0, 0], maps[:, 0, 1] = stretch * torch.cos(turn), -torch.sin(turn) + slant
    maps[:, 1, 0], maps[:, 1, 1] = torch.sin(turn), torch.cos(turn)
    parts = []
    for part, some in zip(np.split(pixels, range(_AT_ONCE, count, _AT_ONCE)), torch.split(maps, _AT_ONCE), strict=True):
        grey = torch.from_numpy(part.astype(np.float32))[:, None]
        grid = functional.affine_grid(_SMALLER * some, list(grey.shape), align_corners=False)
        parts.append(functional.grid_sample(grey, grid, align_corners=False)[:, 0])
    return torch.cat(parts).round().clamp(0, 255).to(torch.uint8).numpy()


def pretrain(model: ViTForImageClassification, images: data.Images, *, epochs: int = EPOCHS) -> None:
    """Trains the model on MNIST's images, distorted anew in each epoch.

    AdamW in random order (`SEED`); the learning rate rises over the first tenth of the steps, and falls to zero.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = epochs * -(-len(images.pixels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=WARM_UP)
    generator = torch.Generator().manual_seed(SEED)
    model.train()
    for epoch in range(epochs):
        inputs, classes = tensors(data.Images(distorted(images.pixels, generator), images.classes))
        for picked in torch.split(torch.randperm(len(inputs), generator=generator), BATCH):
            loss = functional.cross_entropy(model(inputs[picked]).logits, classes[picked])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {epochs}: loss of the last batch {loss.item():.3f}", flush=True)


@torch.no_grad()
def accuracy(model: ViTForImageClassification, inputs: Tensor, classes: Tensor) -> float:
    """Share of the images whose class the model finds."""
    model.eval()
    found = [model(part).logits.argmax(dim=-1) for part in torch.split(inputs, _AT_ONCE)]
    return (torch.cat(found) == classes).float().mean().item()


def tensors(images: data.Images) -> tuple[Tensor, Tensor]:
    """Images as the trainer's `digits` has them, (samples, 1, 8, 8) from -1 to 1, and their classes (samples,)."""
    pixels = torch.from_numpy(np.stack([reduced(one) for one in images.pixels]))
    return pixels[:, None].float() / 8 - 1, torch.from_numpy(images.classes.astype(np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the checkpoint goes")
    out: Path = parser.parse_args().out
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # a sum does not depend on the number of cores
    train, test = data.mnist()
    began = time.monotonic()
    model = new_model()
    pretrain(model, train)
    seconds = time.monotonic() - began
    model.save_pretrained(out)
    print(f"{accuracy(model, *tensors(test)):.2%} of {len(test.classes):,} held-out images, {seconds:.0f} s")
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    print(f"{out / 'model.safetensors'}: SHA-256 {digest}")


if __name__ == "__main__":
    main()
