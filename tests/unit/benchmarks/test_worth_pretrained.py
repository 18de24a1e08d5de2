"""The demo's model is the one that its README describes, and learned digits as scikit-learn draws them."""

import hashlib
import re

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.worth.data import Images
from benchmarks.worth.pretrained import FOLDER, accuracy, distorted, new_model, pretrain, reduced, tensors

README = (FOLDER.parent / "README.md").read_text()


def test_the_shipped_weights_are_those_that_the_readme_names() -> None:
    weights = FOLDER / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() in README
    count = sum(tensor.numel() for tensor in load_file(weights).values())
    assert re.findall(r"[\d,]+(?= parameters)", README) == [f"{count:,}"]


def test_a_digit_is_reduced_to_its_dark_pixels_in_each_block() -> None:
    square, upper = np.full((28, 28), 255, dtype=np.uint8), np.zeros((28, 28), dtype=np.uint8)
    upper[4:10, 4:10] = 255
    upper[10:16, 4] = 255
    assert np.array_equal(reduced(square), np.full((8, 8), 16))
    made = reduced(upper)
    assert (made[:3, 2:6] == 16).all(), "the digit is in the middle of its square, and its upper half is dark"
    assert (made[5:, 4:] == 0).all(), "the lower right is not"


def test_a_narrow_digit_keeps_its_shape_in_the_middle() -> None:
    bar = np.zeros((28, 28), dtype=np.uint8)
    bar[4:24, 2:7] = 255
    made = reduced(bar)
    assert (made[:, 3:5] >= 12).all()
    assert (made[:, [0, 1, 6, 7]] == 0).all()


def test_distortions_are_drawn_for_each_digit_and_repeat_with_the_seed() -> None:
    digit = np.zeros((2, 28, 28), dtype=np.uint8)
    digit[:, 6:22, 12:16] = 255
    made = distorted(digit, torch.Generator().manual_seed(0))
    assert made.shape == digit.shape
    assert not np.array_equal(made[0], made[1])
    assert np.array_equal(made, distorted(digit, torch.Generator().manual_seed(0)))


def test_a_model_learns_what_it_is_trained_on() -> None:
    pixels = np.zeros((512, 28, 28), dtype=np.uint8)
    pixels[:256, 6:22, 12:16] = 255  # a one
    pixels[256:, 6:22, 6:22] = 255  # a filled square
    pixels[256:, 10:18, 10:18] = 0  # a zero
    images = Images(pixels, np.repeat([1, 0], 256).astype(np.uint8))
    model = new_model()
    pretrain(model, images, epochs=6)
    assert accuracy(model, *tensors(images)) == 1.0
