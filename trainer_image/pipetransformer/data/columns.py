"""Turns a program's tables of the `datasets` library into splits. The names of the columns decide which are inputs and
which are targets, by the rules of `Trainer` in transformers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipetransformer.errors import SpecError

from .dataset import NO_TARGET, DataInfo, Dataset, Split, Task
from .masked import MaskedTokens
from .pictures import scaled_pictures
from .processors import PictureScaling
from .tables import column_of, rows_of, with_classes
from .tokens import SpecialTokens

_FIELD = "data"
_LABELS = ("labels", "label")
_TOKENS, _MASK = "input_ids", "attention_mask"
#: Number of rows that are checked at a time.
_ROWS = 4096


def dataset_of_tables(tables: Sequence[Any], processor: Any, task: Task | None, *, dtype: torch.dtype) -> Dataset:
    """Make a dataset of a training table and a held-out table. The held-out table may be empty.

    Args:
        tables: both tables, of the `datasets` library. Inputs are the column `input_ids` (tokens of any lengths),
            `pixel_values`, a column of pictures, or the only other column of numbers. Targets are the column `label`
            or `labels`. Without labels, or with labels that copy the tokens, the target is the next token. Where such a
            copy has -100, the token is no target.
        processor: the tokenizer or image processor that made the inputs; None if the program does not pass it.
        task: the task that the model learns; None if it is unknown.
        dtype: type of floating-point inputs.

    Raises:
        SpecError: a column is missing, or its contents are of another kind.
    """
    names = tables[0].column_names
    if set(tables[1].column_names) != set(names):
        held_out = ", ".join(tables[1].column_names)
        raise SpecError(_FIELD, f"training samples have the columns {', '.join(names)}, held-out ones {held_out}")
    label = next((name for name in _LABELS if name in names), None)
    try:
        transformed = any(table.format["type"] == "custom" for table in tables)
        if _TOKENS in names:
            if transformed:
                words = f"has the column {_TOKENS} and a function of with_transform, which would not be called"
                raise SpecError(_FIELD, f"{words}: apply it by dataset.map")
            return _tokens(tables, label, processor, task)
        if label is None:
            raise SpecError(_FIELD, f"has no column label or labels among {', '.join(names)}")
        if transformed:
            return _transformed(tables, label, processor, task, dtype=dtype)
        numbered, classes, labels = _targets(tables, label)
        pictures = [name for name, feature in tables[0].features.items() if isinstance(feature, datasets.Image)]
        if len(pictures) == 1 and "pixel_values" not in names:
            made = scaled_pictures(numbered, pictures[0], label, classes=classes, labels=labels, dtype=dtype)
            return made if processor is None else _with_processor(made, processor, pictures[0])
        column = _input_column(tables[0], label)
        columns = [table.select_columns([column, label]).with_format("numpy") for table in numbered]
        splits = [Columns(table, column, label, dtype) for table in columns]
        shape = tuple(splits[0].batch([0])[0].shape[1:])
    except ValueError as error:  # a SpecError is also a ValueError
        raise error if isinstance(error, SpecError) else SpecError(_FIELD, str(error)) from error
    return Dataset(splits[0], splits[1], DataInfo(shape, classes, task=task, labels=labels), processor)


def _with_processor(made: Dataset, processor: Any, column: str) -> Dataset:
    """A dataset of a column of pictures, with the program's processor in place of the trainer's scaling.

    Raises:
        SpecError: the processor would make other inputs.
    """
    if not (isinstance(made.processor, PictureScaling) and made.processor.is_that_of(processor)):
        raise SpecError(
            "processor",
            f"does not make the inputs: the trainer itself scales the pictures of the column {column} to [-1, 1], "
            "without resizing them, and saves that: leave it out, or make pixel_values by it",
        )
    return replace(made, processor=processor)


@dataclass(frozen=True)
class Columns:
    """A split whose inputs are one column of numbers, and whose targets are another column.

    Attributes:
        table: a table with these columns only, in the format `numpy`. To select columns takes the library longer the
            more rows there are, so that is not done for each batch.
        inputs: name of the column of inputs.
        label: name of the column of targets.
        dtype: type of floating-point inputs and targets.
    """

    table: Any
    inputs: str
    label: str
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = self.table[list(ids)]
        return self._tensor(rows[self.inputs]), _as_targets(self._tensor(rows[self.label]))

    def _tensor(self, values: Any) -> Tensor:
        tensor = torch.from_numpy(np.stack(list(values)) if values.dtype == object else np.array(values))
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class TransformedRows(Columns):
    """A split whose rows a function of the program transforms when they are read (`with_transform` of `datasets`), so
    the table has all its columns."""

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = self.table[list(ids)]
        return self._stacked(rows[self.inputs]), _as_targets(self._stacked(rows[self.label]))

    def _stacked(self, values: Any) -> Tensor:
        tensor = torch.stack([torch.as_tensor(value) for value in values])
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _as_targets(values: Tensor) -> Tensor:
    """Classes as int64, which torch's losses need: a column may hold smaller numbers, or true and false. Floating-point
    numbers stay as they are."""
    return values if values.is_floating_point() else values.long()


def _transformed(
    tables: Sequence[Any], label: str, processor: Any, task: Task | None, *, dtype: torch.dtype
) -> Dataset:
    given = list(tables[0][0])
    inputs = [name for name in given if name != label]
    if label not in given or len(inputs) != 1:
        raise SpecError(_FIELD, f"the function of with_transform returns {', '.join(given)}, not one input and {label}")
    splits = [TransformedRows(table, inputs[0], label, dtype) for table in tables]
    feature = tables[0].features[label]
    labels = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else ()
    classes = len(labels) or _targets([table.with_format(None) for table in tables], label)[1]
    shape = tuple(splits[0].batch([0])[0].shape[1:])
    return Dataset(splits[0], splits[1], DataInfo(shape, classes, task=task, labels=labels), processor)


@dataclass(frozen=True)
class TokenRows:
    """A split of tokens, padded at the end. The target is the class in the column `label` if there is one. Otherwise it
    is the next element of the column `following`: `input_ids`, or a copy of it with -100 for tokens that are no target.
    `table` has only the columns that are read.
    """

    table: Any
    length: int
    padding: int
    label: str | None = None
    following: str = _TOKENS

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = self.table[list(ids)]
        tokens = _unpadded(rows, _TOKENS)
        inputs = self._padded(tokens, self.padding)
        if self.label is not None:
            return inputs, torch.as_tensor(rows[self.label], dtype=torch.int64)
        following = tokens if self.following == _TOKENS else _unpadded(rows, self.following)
        targets = self._padded(following, NO_TARGET).roll(-1, dims=1)
        targets[:, -1] = NO_TARGET  # it was the first token's
        return inputs, targets

    def _padded(self, rows: Sequence[Tensor], padding: int) -> Tensor:
        padded = torch.full((len(rows), self.length), padding, dtype=torch.int64)
        for number, row in enumerate(rows):
            padded[number, : len(row)] = row
        return padded


@dataclass(frozen=True)
class PaddedTokenRows(TokenRows):
    """Token rows of different lengths."""

    def lengths(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([max(1, len(row)) for row in _unpadded(self.table[list(ids)], _TOKENS)])


def _unpadded(rows: Mapping[str, Any], name: str) -> list[Tensor]:
    """The lists in column `name` of some rows, without the padding that the attention mask shows."""
    masks = rows.get(_MASK) or [[1] * len(row) for row in rows[name]]
    return [torch.tensor(row[: sum(mask)]) for row, mask in zip(rows[name], masks, strict=True)]


def _tokens(tables: Sequence[Any], label: str | None, processor: Any, task: Task | None) -> Dataset:
    lists = label is not None and _is_list(tables[0], label)
    if task is None:
        task = Task.CLASS if label is not None and not lists else Task.NEXT_TOKEN
    if task is Task.CLASS and (label is None or lists):
        raise SpecError(_FIELD, "needs a column label or labels with one class for each sample: the model classifies")
    for table in tables:
        _check_rows(table)
        if task is not Task.CLASS and label is not None:
            _check_copies(table, label, task)
    lengths = [_lengths(table) for table in tables]
    longest = max(pc.max(each).as_py() or 0 for each in lengths)
    highest = max(_highest(table, _TOKENS) for table in tables)
    vocabulary = 1 + highest if processor is None else len(processor)
    if highest >= vocabulary:
        words = f"column {_TOKENS} holds the token {highest}, but the tokenizer has only {vocabulary} tokens"
        raise SpecError(_FIELD, f"{words}: pass the tokenizer that made {_TOKENS} as processor")
    special = SpecialTokens() if processor is None else SpecialTokens.of(processor)
    classes, target, following = vocabulary, None, label or _TOKENS
    labels: tuple[str, ...] = ()
    if task is Task.CLASS and label is not None:
        tables, classes, labels = with_classes(tables, label)
        target, following = label, _TOKENS
    splits: list[Split] = [_token_split(table, longest, special.padding, target, following) for table in tables]
    if task is Task.MASKED_TOKEN:
        if special.mask is None:
            raise SpecError(
                "processor",
                "the model learns masked tokens: pass the tokenizer that made input_ids, which must have a mask token",
            )
        if any(isinstance(split, PaddedTokenRows) for split in splits):
            raise SpecError(_FIELD, "rows of input_ids have different lengths: join and cut them to one length")
        splits = [MaskedTokens(split, special.mask, vocabulary, special.never_masked) for split in splits]
    info = DataInfo((longest,), classes, vocabulary, task=task, labels=labels, **special.in_info)
    return Dataset(splits[0], splits[1], info, processor)


def _token_split(table: Any, longest: int, padding: int, label: str | None, following: str) -> Split:
    columns = [name for name in dict.fromkeys((_TOKENS, _MASK, label, following)) if name in table.column_names]
    table = table.select_columns(columns).with_format(None)
    shortest = pc.min(_lengths(table)).as_py() if len(table) else longest
    ragged = shortest < longest or _is_masked(table)
    return (PaddedTokenRows if ragged else TokenRows)(table, longest, padding, label, following)


def _check_rows(table: Any) -> None:
    """Refuse rows with attention masks or token types that the trainer cannot pass to the model.

    Raises:
        SpecError: names the column and what is wrong with it.
    """
    if not _is_list(table, _TOKENS):
        raise SpecError(_FIELD, f"column {_TOKENS} holds {table.features[_TOKENS]}, not lists of tokens")
    if "token_type_ids" in table.column_names and _highest(table, "token_type_ids") > 0:
        raise SpecError(_FIELD, "column token_type_ids marks a second text, which is not supported")
    if _MASK in table.column_names:
        for rows, _, mask in _elements(table, _MASK):
            if (other := rows[(mask != 0) & (mask != 1)]).size:
                raise SpecError(_FIELD, f"column {_MASK}: row {other[0]} holds other numbers than 0 and 1")
            if (later := rows[1:][(mask[1:] > mask[:-1]) & (rows[1:] == rows[:-1])]).size:
                raise SpecError(_FIELD, f"column {_MASK}: row {later[0]} hides tokens before others: pad at the end")


def _check_copies(table: Any, label: str, task: Task) -> None:
    """Refuse labels that the model does not learn.

    Raises:
        SpecError: names the column, the first row that is wrong, and what to do.
    """
    if not _is_list(table, label):
        raise SpecError(
            _FIELD, f"column {label} holds one class for each sample, but the model learns {task}: remove the column"
        )
    for rows, tokens, labels in _elements(table, label):
        if (other := rows[(labels != tokens) & (labels != NO_TARGET)]).size:
            raise SpecError(
                _FIELD,
                f"column {label}: row {other[0]} holds other tokens than input_ids. The trainer derives next or masked "
                "tokens from input_ids: remove the column, or pass your own Dataset",
            )
        if task is Task.MASKED_TOKEN and (left_out := rows[labels == NO_TARGET]).size:
            raise SpecError(
                _FIELD,
                f"column {label}: row {left_out[0]} leaves out targets with {NO_TARGET}, but the trainer draws the "
                "masked tokens itself: remove the column, or pass your own Dataset",
            )


def _elements(table: Any, name: str) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]]:
    """Read a column of lists and the column `input_ids`, some rows at a time.

    Yields:
        For each element: its row, its token in `input_ids`, and its value in the column.

    Raises:
        SpecError: a row has lists of different lengths.
    """
    columns = table.select_columns([_TOKENS, name]).with_format("arrow")
    for start in range(0, len(table), _ROWS):
        part = columns[start : start + _ROWS]
        lengths, others = (pc.fill_null(pc.list_value_length(part[each]), 0).to_numpy() for each in (_TOKENS, name))
        if (different := np.flatnonzero(lengths != others)).size:
            row = different[0]
            raise SpecError(
                _FIELD,
                f"column {name}: row {start + row} has {others[row]} elements, but {lengths[row]} in {_TOKENS}",
            )
        rows = start + np.repeat(np.arange(len(lengths)), lengths)
        yield rows, pc.list_flatten(part[_TOKENS]).to_numpy(), pc.list_flatten(part[name]).to_numpy()


def _lengths(table: Any) -> pa.ChunkedArray:
    return rows_of(table, pc.list_value_length(table.data.column(_TOKENS)))


def _is_masked(table: Any) -> bool:
    if _MASK not in table.column_names or not len(table):
        return False
    return int(pc.min(pc.list_flatten(column_of(table, _MASK))).as_py() or 0) == 0


def _highest(table: Any, name: str) -> int:
    return int(pc.max(pc.list_flatten(column_of(table, name))).as_py() or 0)


def _is_list(table: Any, name: str) -> bool:
    return isinstance(table.features[name], datasets.Sequence | datasets.LargeList | list)


def _targets(tables: Sequence[Any], label: str) -> tuple[list[Any], int, tuple[str, ...]]:
    """If targets are classes: the tables with numbered classes, the number of classes, and their names. Otherwise the
    tables as they are, 0, and no names."""
    if _is_list(tables[0], label) or "float" in str(tables[0].features[label].dtype):
        return list(tables), 0, ()
    return with_classes(tables, label)


def _input_column(table: Any, label: str) -> str:
    """The name of the column with the inputs.

    Raises:
        SpecError: no column can be the inputs, or several can.
    """
    if "pixel_values" in table.column_names:
        return "pixel_values"
    others = [name for name in table.column_names if name != label]
    texts = [name for name in others if str(getattr(table.features[name], "dtype", "")) in ("string", "large_string")]
    if texts:
        text = texts[0]
        raise SpecError(
            _FIELD,
            f"column {text} holds texts, not tokens: tokenize them, for example by dataset.map(lambda rows: "
            f'tokenizer(rows["{text}"], truncation=True), batched=True), and pass processor=tokenizer',
        )
    if len(others) != 1:
        raise SpecError(
            _FIELD,
            f"has the columns {', '.join(table.column_names)}: name the inputs input_ids or pixel_values, or choose "
            f'them by dataset.select_columns([..., "{label}"])',
        )
    name: str = others[0]
    return name
