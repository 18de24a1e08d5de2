"""Tables of the `datasets` library: reads splits and slices, checks columns, and maps rows once for all workers."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from pipetransformer.errors import SpecError, meant

#: Files that `save_to_disk` of `datasets` writes: the first for a dataset with splits, the second for a single table.
_SAVED = ("dataset_dict.json", "state.json")
#: By suffix of a file: the library's reader and its options.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}


def read_tables(path: str, name: str | None, splits: Mapping[str, str]) -> list[Any]:
    """Read a table for each split. A single table or file counts as the split `train`.

    Args:
        path: folder, file or hub id.
        name: name of the dataset's configuration; None if it has only one.
        splits: for each option of the spec (`train`, `test`), the split or slice that it names, such as `train[:90%]`.

    Raises:
        SpecError: a split does not exist; the error names the option.
    """
    if any((Path(path) / file).exists() for file in _SAVED):
        saved = datasets.load_from_disk(path)
        by_name = {"train": saved} if isinstance(saved, datasets.Dataset) else saved
        return [_split(by_name, split, option) for option, split in splits.items()]
    reader = _READERS.get(Path(path).suffix.lower()) if Path(path).is_file() else None
    if reader is None:
        return list(datasets.load_dataset(path, name, split=list(splits.values())))
    by_name = {"train": datasets.load_dataset(reader[0], data_files=path, split="train", **reader[1])}
    return [_split(by_name, split, option) for option, split in splits.items()]


def _split(by_name: Mapping[str, Any], split: str, option: str) -> Any:
    if split in by_name:
        return by_name[split]
    try:
        return _slice(by_name, split)
    except (ValueError, KeyError) as error:
        known = ", ".join(by_name)
        raise SpecError(
            f"spec.data.options.{option}",
            f'there is no split "{split}"{meant(split, by_name)}, only {known}: name one, or slices such as '
            "train: train[:90%] and test: train[90%:]",
        ) from error


def mapped(table: Any, function: Callable[..., dict[str, Any]], features: Any = None) -> Any:
    """Make a table of the columns that `function` returns for batches of rows.

    The library caches the result in the table's folder, or in its own cache if that folder is read-only. So other
    workers that see the same files only read it.
    """
    return table.map(
        function,
        batched=True,
        remove_columns=table.column_names,
        features=features,
        cache_file_name=_cache_file(table, function),
    )


def column_of(table: Any, name: str) -> pa.ChunkedArray:
    """A column as it is in the file, without conversion to Python objects."""
    return table.select_columns(name).with_format("arrow")[:][name]


def rows_of(table: Any, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The entries of `column`, a column of `table.data`, for the rows of a table that may be shuffled.

    `column_of` takes the library 10 microseconds a row then. This function copies the entries, so they must be short.
    """
    return column if table._indices is None else column.take(table._indices.column(0))


def check_texts(tables: Sequence[Any], name: str) -> None:
    """Refuse a column that does not hold texts.

    Raises:
        ValueError: names the column's type, or the first row without a text and its split.
    """
    columns = [column_of(table, name) for table in tables]
    for column in columns:
        if not _is_text(column):
            raise ValueError(f"column {name} holds {column.type}, not texts")
    _refuse(columns, name, [pc.is_null(column) for column in columns], "text")


def with_classes(tables: Sequence[Any], name: str) -> tuple[list[Any], int, tuple[str, ...]]:
    """Number the classes in the column `name`. Classes that are texts are numbered in alphabetical order.

    Returns:
        The tables with whole numbers from 0 in this column, the number of classes, and their names (may be empty).

    Raises:
        ValueError: the column does not hold classes, or a row has no class; the error names the first such row and
            its split. Or the tables do not number their classes alike.
    """
    columns = [rows_of(table, table.data.column(name)) for table in tables]
    if all(_is_text(column) for column in columns):
        _refuse(columns, name, [pc.is_null(column) for column in columns], "class")
        labels = tuple(sorted({each for column in columns for each in column.unique().to_pylist()}))
        return [_numbered(table, name, labels) for table in tables], len(labels), labels
    for column in columns:
        if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
            raise ValueError(
                f"column {name} holds {column.type}, not classes: make them texts, or whole numbers from 0"
            )
    numbers = [column.cast(pa.int64()) for column in columns]
    _refuse(numbers, name, [pc.less(pc.fill_null(column, -1), 0) for column in numbers], "class")
    highest = max(pc.max(column).as_py() if len(column) else -1 for column in numbers)
    feature = tables[0].features[name]
    if isinstance(feature, datasets.ClassLabel):
        _check_names(tables, name)
        if highest >= feature.num_classes:
            raise ValueError(f"column {name} holds the class {highest}, but names only {feature.num_classes} classes")
        return list(tables), feature.num_classes, tuple(feature.names)
    if all(pa.types.is_boolean(column.type) for column in columns):
        return list(tables), 2, ("False", "True")
    return list(tables), highest + 1, ()


def _check_names(tables: Sequence[Any], name: str) -> None:
    """Refuse tables in which a class has the same number, but another name.

    Raises:
        ValueError: names the first such class.
    """
    names = [feature.names for table in tables if isinstance(feature := table.features[name], datasets.ClassLabel)]
    for number, alike in enumerate(zip(*names, strict=False)):
        if len(set(alike)) > 1:
            raise ValueError(
                f'column {name}: class {number} is "{alike[0]}" in the training split, but "{alike[1]}" in the held-out'
                " one: number the classes alike, for example by align_labels_with_mapping"
            )


def _is_text(column: pa.ChunkedArray) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _numbered(table: Any, name: str, labels: tuple[str, ...]) -> Any:
    """The table with the classes in the column `name` as numbers. Other columns are not copied, because they may be
    large, such as pictures. An empty table, such as that of no held-out samples, stays as it is."""
    if not len(table):
        return table  # the library would leave out the column
    column = table.select_columns([name]).with_format(None)
    features = datasets.Features({name: datasets.ClassLabel(names=list(labels))})
    function = partial(_numbers, name=name, numbers={label: number for number, label in enumerate(labels)})
    made = column.map(function, batched=True, features=features, cache_file_name=_cache_file(column, function))
    return datasets.concatenate_datasets([table.remove_columns(name), made], axis=1)


def _numbers(rows: dict[str, list[Any]], *, name: str, numbers: dict[str, int]) -> dict[str, Any]:
    return {name: [numbers[each] for each in rows[name]]}


def _slice(saved: Any, split: str) -> Any:
    sizes = {name: len(table) for name, table in saved.items()}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    return datasets.concatenate_datasets([saved[part.splitname].select(range(part.from_, part.to)) for part in parts])


def _cache_file(table: Any, function: Callable[..., Any]) -> str | None:
    """Path of a file in the library's cache; None if the table's folder can be written, where the library caches."""
    if all(os.access(Path(file["filename"]).parent, os.W_OK) for file in table.cache_files):
        return None
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "mapped"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / f"cache-{datasets.fingerprint.Hasher.hash((table._fingerprint, function))}.arrow")


def _refuse(columns: Sequence[pa.ChunkedArray], name: str, wrong: Sequence[pa.ChunkedArray], what: str) -> None:
    """Refuse a column, of the training split and of the held-out split, in which an entry is wrong.

    Raises:
        ValueError: names the row of the first wrong entry, and its split.
    """
    for split, column, flags in zip(("training", "held-out"), columns, wrong, strict=False):
        row = pc.index(flags, True).as_py()
        if row >= 0:
            raise ValueError(
                f"column {name}: row {row} of the {split} split is {column[row].as_py()}, which is not a {what}"
            )
