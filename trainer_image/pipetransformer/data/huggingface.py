"""Datasets of the Hugging Face library: a local folder or a hub id, tokenised once and read from its cache by all.

The library keeps what it downloaded and what was made of it in files that it maps into memory, so a worker holds only
what it reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from .dataset import DataInfo, Dataset
from .tokens import PAD, VOCABULARY, Encode, as_lengths, encode_bytes

_LARGEST_VALUE = 255.0


@dataclass(frozen=True)
class _Rows:
    """A split with columns `input` and `target`; images are scaled to [-1, 1] in `dtype`."""

    table: Any
    dtype: torch.dtype | None = None

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = self.table[list(ids)]
        if self.dtype is None:
            return torch.as_tensor(rows["input"]), torch.as_tensor(rows["target"])
        images = torch.stack([_image(image) for image in rows["input"]]).to(self.dtype)
        return images / (_LARGEST_VALUE / 2) - 1, torch.as_tensor(rows["target"])


@dataclass(frozen=True)
class _PaddedRows(_Rows):
    """And a column `length`."""

    def lengths(self, ids: Sequence[int]) -> Tensor:
        return torch.as_tensor(self.table.select_columns("length")[list(ids)]["length"])


def load_huggingface(
    *,
    path: str,
    dtype: torch.dtype,
    name: str | None = None,
    train: str = "train",
    test: str = "test",
    text: str | None = None,
    image: str | None = None,
    label: str | None = None,
    tokenizer: str | None = None,
    length: int | Sequence[int] = 128,
) -> Dataset:
    """Samples of one shape.

    With `text` and `label` a padded sample is a text and its class; with `text` alone texts are packed, and a target is
    the next token; with `image` and `label` a sample is an image, and all must be of one size.

    Args:
        path: a folder that `save_to_disk` wrote, or whatever `datasets.load_dataset` takes.
        dtype: of images.
        name: of the dataset's configuration.
        train: split to train on; the library's slices are understood, such as `train[:90%]`.
        test: held-out split.
        text: column of texts.
        image: column of images.
        label: column of classes.
        tokenizer: folder or hub id; bytes by default.
        length: tokens of a sample; of padded ones a few lengths, of which each gets the shortest that it fits.

    Raises:
        ValueError: the options fit neither each other nor the data.
    """
    if not path:
        raise ValueError("path is empty: name a folder or a hub id in spec.data.path")
    if (text is None) == (image is None) or (image is not None and label is None):
        raise ValueError("options need text, text and label, or image and label, each the name of a column")
    if (Path(path) / "dataset_dict.json").exists():
        saved = datasets.load_from_disk(path)
        tables = [saved[train], saved[test]]
    else:
        tables = datasets.load_dataset(path, name, split=[train, test])
    needed = {column for column in (text, image, label) if column is not None}
    for table in tables:
        if missing := needed - set(table.column_names):
            raise ValueError(f"no column {', '.join(sorted(missing))} among {', '.join(table.column_names)}")
    if image is not None:
        assert label is not None
        columns = {image: "input", label: "target"}
        tables = [table.select_columns(list(columns)).rename_columns(columns) for table in tables]
        splits = [_Rows(table, dtype) for table in tables]
        shape = tuple(splits[0].batch([0])[0].shape[1:])
        return Dataset(splits[0], splits[1], DataInfo(shape, _num_classes(tables, "target")))
    assert text is not None
    *shorter, longest = as_lengths(length)
    encode, padding, vocabulary = _tokens(tokenizer, None if label is None else longest)
    if label is None:
        if shorter:
            raise ValueError("packed samples have one length")
        pack = partial(_pack, column=text, encode=encode, length=longest)
        packed = [table.map(pack, batched=True, remove_columns=table.column_names) for table in tables]
        if not all(map(len, packed)):
            raise ValueError(f"the texts of a split do not fill one sample of {longest} tokens")
        splits = [_Rows(table.with_format("numpy")) for table in packed]
        return Dataset(splits[0], splits[1], DataInfo((longest,), vocabulary, vocabulary))
    num_classes = _num_classes(tables, label)
    pad = partial(_pad, columns=(text, label), encode=encode, length=longest, padding=padding)
    padded = [table.map(pad, batched=True, remove_columns=table.column_names) for table in tables]
    splits = [_PaddedRows(table.with_format("numpy")) for table in padded]
    lengths = (*shorter, longest) if shorter else ()
    return Dataset(splits[0], splits[1], DataInfo((longest,), num_classes, vocabulary, lengths))


def _tokens(tokenizer: str | None, longest: int | None) -> tuple[Encode, int, int]:
    """What encodes a text, up to so many tokens with those that mark its end, the id of padding, the number of ids."""
    if tokenizer is None:
        return encode_bytes, PAD, VOCABULARY
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(tokenizer)
    encode: Callable[[str], list[int]] = made.encode
    if longest is not None:
        encode = partial(made.encode, truncation=True, max_length=longest)
        encode("")  # which is noted in the tokenizer, so that the cache knows it again by what it then is
    return encode, made.pad_token_id or PAD, len(made)


def _pack(rows: dict[str, list[Any]], *, column: str, encode: Encode, length: int) -> dict[str, Any]:
    """Texts one after the other, cut into samples; what a batch of texts leaves over is dropped."""
    tokens = np.fromiter(chain.from_iterable(map(encode, rows[column])), dtype=np.int64)
    count = max(0, (len(tokens) - 1) // length)
    used = tokens[: count * length + 1]
    return {"input": used[:-1].reshape(count, length), "target": used[1:].reshape(count, length)}


def _pad(
    rows: dict[str, list[Any]], *, columns: tuple[str, str], encode: Encode, length: int, padding: int
) -> dict[str, Any]:
    text, label = columns
    encoded = [list(encode(each))[:length] for each in rows[text]]
    return {
        "input": [ids + [padding] * (length - len(ids)) for ids in encoded],
        "target": rows[label],
        "length": [max(1, len(ids)) for ids in encoded],
    }


def _num_classes(tables: Sequence[Any], column: str) -> int:
    feature = tables[0].features[column]
    if isinstance(feature, datasets.ClassLabel):
        return int(feature.num_classes)
    return 1 + max(int(label) for table in tables for label in table[column])


def _image(image: Any) -> Tensor:
    """(channels, height, width) of a picture as the library decodes it."""
    pixels = torch.as_tensor(np.array(image))
    return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)
