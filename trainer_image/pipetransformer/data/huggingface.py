"""Loads datasets by the library `datasets` of Hugging Face, from a local folder, a file or a hub id.

Texts are tokenized once, and all workers of a machine read the library's cache. The library maps its files into memory,
so a worker's memory holds only what it reads.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipetransformer.errors import SpecError, building, meant

from .dataset import DataInfo, Dataset, Processor, Split, Task, as_task
from .masked import MaskedTokens
from .pictures import scaled_pictures
from .processors import ByteTokenizer
from .tables import check_texts, column_of, mapped, read_tables, with_classes
from .tokens import END, PAD, START, VOCABULARY, Encode, SpecialTokens, as_lengths, encode_bytes

_OPTIONS = "spec.data.options"


@dataclass(frozen=True)
class _PaddedRows:
    """A split. The table `table` has the columns `input` and `target`, and `used` has the column `length`.

    To select a column takes the library longer the more rows there are, so that is not done for each batch.
    """

    table: Any
    used: Any

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = self.table[list(ids)]
        return torch.as_tensor(rows["input"]), torch.as_tensor(rows["target"], dtype=torch.int64)

    def lengths(self, ids: Sequence[int]) -> Tensor:
        return torch.as_tensor(self.used[list(ids)]["length"])


class _Packed:
    """A split that joins all texts and cuts them into samples of one length. Targets are the next tokens. Tokens at the
    end that do not fill a sample are dropped."""

    def __init__(self, table: Any, length: int) -> None:
        """
        Args:
            table: a table with a list of tokens for each text, in its column `tokens`.
            length: tokens in a sample.

        Raises:
            ValueError: the texts do not fill one sample.
        """
        self._table = table
        self._tokens = pa.chunked_array([part.flatten() for part in column_of(table, "tokens").chunks], pa.int32())
        self._length = length
        if not len(self):
            raise ValueError(f"the {len(self._tokens)} tokens of a split do not fill one sample of {length}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the table, which names its files. The tokens themselves would be copied to each loader process."""
        return _Packed, (self._table, self._length)

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._length

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        size = self._length + 1
        rows = [self._tokens.slice(each * self._length, size).to_numpy() for each in ids]
        tokens = torch.from_numpy(np.array(rows, dtype=np.int64).reshape(len(rows), size))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class _Tokenizer:
    """A tokenizer, and facts about its vocabulary.

    Attributes:
        encode: returns the token ids of a text. If it cuts a long text, the last id is still the end token.
        num_ids: size of the vocabulary.
        special: its special tokens.
        processor: the tokenizer to save with the finished model.
    """

    encode: Encode
    num_ids: int
    special: SpecialTokens
    processor: Processor


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
    task: str | None = None,
) -> Dataset:
    """Load a dataset whose samples have one shape.

    With `text` and `label`, a sample is a padded text with its class. With `text` alone, texts are joined and cut into
    samples, whose targets are the next or the masked tokens. With `image` and `label`, a sample is an image with its
    class. All images must have the same size.

    Args:
        path: a folder that `save_to_disk` wrote, with one table or several splits; a CSV, TSV, JSON lines or Parquet
            file, which becomes the split `train`; or what `datasets.load_dataset` takes, such as a hub id.
        dtype: type of images.
        name: name of the dataset's configuration, if it has several.
        train: split to train on, or a slice such as `train[:90%]`.
        test: held-out split, or a slice.
        text: name of the column with texts.
        image: name of the column with images.
        label: name of the column with classes: whole numbers from 0, or texts.
        tokenizer: folder or hub id of a tokenizer. By default tokens are bytes.
        length: tokens in a sample. With `label` it may be a list of lengths: a text is padded to the shortest that it
            fits.
        task: a `Task`; by default Class with `label`, otherwise NextToken.

    Raises:
        SpecError: the options contradict each other or do not fit the data.
        ValueError: a column has contents of another kind, or the texts do not fill one sample.
    """
    if not path:
        raise SpecError("spec.data.path", "is empty: name a folder, a file or a hub id")
    if (text is None) == (image is None) or (image is not None and label is None):
        raise SpecError(
            _OPTIONS, "need text, text and label, or image and label, each the name of a column of the dataset"
        )
    target = _target(task, label)
    tables = read_tables(path, name, {"train": train, "test": test})
    for option, column in (("text", text), ("image", image), ("label", label)):
        for table in tables if column is not None else ():
            if column not in table.column_names:
                raise SpecError(
                    f"{_OPTIONS}.{option}",
                    f"no column {column}{meant(str(column), table.column_names)} among {', '.join(table.column_names)}",
                )
    if text is None:
        numbered, classes, labels = with_classes(tables, str(label))
        return scaled_pictures(numbered, str(image), str(label), classes=classes, labels=labels, dtype=dtype)
    check_texts(tables, text)
    if label is None:
        return _packed(tables, text, tokenizer, as_lengths(length), target)
    return _padded(tables, text, label, tokenizer, as_lengths(length))


def _target(task: str | None, label: str | None) -> Task:
    target = as_task(task or (Task.NEXT_TOKEN if label is None else Task.CLASS))
    if (target is Task.CLASS) != (label is not None):
        raise SpecError(
            f"{_OPTIONS}.task", f"task {target} is learnt {'with' if label is None else 'without'} a column `label`"
        )
    return target


def _packed(tables: Sequence[Any], text: str, tokenizer: str | None, lengths: Sequence[int], target: Task) -> Dataset:
    *shorter, length = lengths
    if shorter:
        raise ValueError("packed samples have one length")
    tokens = _tokenizer(tokenizer, length, target)
    mask = tokens.special.mask
    if target is Task.MASKED_TOKEN and mask is None:
        raise SpecError(f"{_OPTIONS}.tokenizer", f"task {target} needs a mask token, but {tokenizer} has none")
    encode = partial(_encode, column=text, encode=tokens.encode)
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("int32"))})
    splits: list[Split] = [_Packed(mapped(table, encode, features), length) for table in tables]
    num_ids = tokens.num_ids
    if target is Task.MASKED_TOKEN and mask is not None:
        splits = [MaskedTokens(split, mask, num_ids, tokens.special.never_masked) for split in splits]
        num_ids = max(num_ids, mask + 1)
    info = DataInfo((length,), num_ids, num_ids, task=target, **tokens.special.in_info)
    return Dataset(splits[0], splits[1], info, tokens.processor)


def _padded(tables: Sequence[Any], text: str, label: str, tokenizer: str | None, lengths: Sequence[int]) -> Dataset:
    tables, classes, labels = with_classes(tables, label)
    *shorter, longest = lengths
    tokens = _tokenizer(tokenizer, longest, Task.CLASS)
    pad = partial(_pad, columns=(text, label), encode=tokens.encode, length=longest, padding=tokens.special.padding)
    made = [mapped(table, pad).with_format("numpy") for table in tables]
    splits = [_PaddedRows(table.remove_columns("length"), table.select_columns("length")) for table in made]
    padded = (*shorter, longest) if shorter else ()
    info = DataInfo((longest,), classes, tokens.num_ids, padded, Task.CLASS, labels, **tokens.special.in_info)
    return Dataset(splits[0], splits[1], info, tokens.processor)


def _tokenizer(name: str | None, length: int, target: Task) -> _Tokenizer:
    """Load the tokenizer `name` of transformers, or make one for bytes if it is None.

    For task Class a tokenizer of transformers cuts texts to `length` tokens.
    """
    if name is None:
        masks = target is Task.MASKED_TOKEN
        processor = ByteTokenizer(length, ends=target is not Task.NEXT_TOKEN, masks=masks)
        return _Tokenizer(encode_bytes, VOCABULARY, SpecialTokens(PAD, START, END, mask=VOCABULARY), processor)
    from transformers import AutoTokenizer

    with building(f"{_OPTIONS}.tokenizer", f"{name} cannot be read"):
        made = AutoTokenizer.from_pretrained(name)
    processor = copy.deepcopy(made)
    encode: Encode = made.encode
    if target is Task.CLASS:
        encode = partial(made.encode, truncation=True, max_length=length)
        encode("")  # now the tokenizer holds these options, so each worker computes the same fingerprint of the cache
    return _Tokenizer(encode, len(made), SpecialTokens.of(made), processor)


def _encode(rows: dict[str, list[Any]], *, column: str, encode: Encode) -> dict[str, Any]:
    return {"tokens": [list(encode(text)) for text in rows[column]]}


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
