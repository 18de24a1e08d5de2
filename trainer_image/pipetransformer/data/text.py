"""Loads texts from a folder of files, or the docstrings of Python's own library, which every worker has.

The model learns to predict next or masked bytes, or the class of a paragraph: its sub-folder or package.
"""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .dataset import DataInfo, Dataset, Task, as_task
from .masked import MaskedTokens
from .processors import ByteTokenizer
from .tokens import END, PAD, START, VOCABULARY, as_lengths, encode_bytes, pack, pad

#: Packages of Python's library that have long docstrings.
PACKAGES = ("asyncio", "concurrent", "email", "http", "logging", "multiprocessing", "unittest", "xml")
_HELD_OUT_EVERY = 5
_SHORTEST = 40
#: Largest number of characters in a page. Paragraphs in Python's docstrings are shorter.
_PAGE = 4096
#: Name of the class of files that are in no sub-folder.
_TOP = "."
_SUFFIXES = {".txt", ".md", ".rst"}


def load_text(
    *,
    path: str,
    dtype: torch.dtype,
    task: str = Task.NEXT_TOKEN,
    length: int | Sequence[int] = 128,
    packages: Sequence[str] = PACKAGES,
) -> Dataset:
    """Load paragraphs as bytes. Of each class the 1st, 6th, 11th, ... paragraph is held out.

    Paragraphs of fewer than 40 characters are left out, except those of a class's folder. For the tasks NextToken and
    MaskedToken, paragraphs longer than a page are cut into pages. So a single long document has both training and
    held-out samples.

    Args:
        path: a folder of .txt, .md and .rst files, whose sub-folders are the classes; empty to read `packages`.
        dtype: unused, because there are no floating-point inputs.
        task: name of a `Task`. With Class, the class of a text is its sub-folder or package.
        length: tokens in a sample. With task Class it may be a list of lengths: a text is padded to the shortest that
            it fits.
        packages: packages of Python's library to read if `path` is empty.

    Raises:
        SpecError: the task is unknown.
        ValueError: there is too little text.
        OSError, ImportError: a file or package cannot be read.
    """
    target, (*shorter, longest) = as_task(task), as_lengths(length)
    sources = _folder(Path(path)) if path else {package: _docstrings(package) for package in packages}
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for label, name in enumerate(sorted(sources)):
        found = [part.strip() for text in sources[name] for part in text.split("\n\n")]
        if target is not Task.CLASS:
            found = [part[start : start + _PAGE] for part in found for start in range(0, len(part), _PAGE)]
        earlier = len(train)
        shortest = 1 if path and target is Task.CLASS else _SHORTEST
        for number, paragraph in enumerate(part for part in found if len(part) >= shortest):
            (train if number % _HELD_OUT_EVERY else test).append((paragraph, label))
        if target is Task.CLASS and len(train) == earlier:
            raise ValueError(f"the class {name or _TOP} has no training text: of its paragraphs the first is held out")
    if not train:
        raise ValueError(f"too few paragraphs ({len(test)}): the first is held out. Blank lines separate paragraphs")
    ids: dict[str, Any] = {"pad_id": PAD, "start_id": START, "end_id": END}
    if target is not Task.CLASS:
        if shorter:
            raise ValueError("packed samples have one length")
        splits = [pack((text for text, _ in part), longest, encode_bytes) for part in (train, test)]
        masks, size = target is Task.MASKED_TOKEN, VOCABULARY
        if masks:
            splits = [MaskedTokens(split, mask=VOCABULARY, num_ids=VOCABULARY) for split in splits]
            size += 1
        info = DataInfo((longest,), size, size, task=target, **ids)
        return Dataset(splits[0], splits[1], info, ByteTokenizer(longest, ends=masks, masks=masks))
    padded = [pad(part, longest, encode_bytes) for part in (train, test)]
    lengths = (*shorter, longest) if shorter else ()
    labels = tuple(name or _TOP for name in sorted(sources))
    info = DataInfo((longest,), len(sources), VOCABULARY, lengths, target, labels, **ids)
    return Dataset(padded[0], padded[1], info, ByteTokenizer(longest))


def _folder(folder: Path) -> dict[str, list[str]]:
    """Texts by sub-folder, without hidden files. Files that are directly in the folder belong to the class ''."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    texts: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        # A ConfigMap's volume has all files again, in a hidden folder whose name differs from pod to pod.
        if file.suffix in _SUFFIXES and not any(part.startswith(".") for part in parts):
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text: {error}") from error
            texts.setdefault(parts[0] if len(parts) > 1 else "", []).append(text)
    if not texts:
        raise FileNotFoundError(f"{folder} has no {', '.join(sorted(_SUFFIXES))} files")
    return texts


def _docstrings(package: str) -> list[str]:
    """Docstrings of all modules, classes and functions of a package. Reads its sources without running them."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not a package of Python's library")
    folder = Path(spec.submodule_search_locations[0])
    return [text for file in sorted(folder.rglob("*.py")) for text in _docstrings_of(file)]


def _docstrings_of(file: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text
