"""Loads the dataset that the spec names."""

import inspect
from collections.abc import Callable
from functools import partial

import torch

from pipetransformer.errors import SpecError, meant
from pipetransformer.user_code import import_function
from pipetransformer_contract.spec import Data

from .dataset import Dataset, Task, as_task
from .digits import load_digits
from .patience import read_patiently
from .text import load_text

#: Arguments of every dataset function that are not options of the spec.
_GIVEN = ("path", "dtype")


def load_dataset(spec: Data, *, dtype: torch.dtype) -> Dataset:
    """Load the dataset of `spec`.

    This calls the built-in or imported function with `path` (empty if the spec has none), `dtype` and the options.

    Args:
        spec: the section `data` of the spec.
        dtype: type of floating-point inputs.

    Raises:
        SpecError: the name is unknown or cannot be imported (`InvalidSpec`), or the data cannot be read
            (`DataUnreadable`).
    """
    function = _function(spec.name)
    try:
        dataset = read_patiently(partial(function, path=spec.path, dtype=dtype, **spec.options))
    except SpecError:
        raise
    except Exception as error:
        field = "spec.data.path" if spec.path else "spec.data.options"
        raise SpecError(field, f"{spec.name}: {type(error).__name__}: {error}", reason="DataUnreadable") from error
    if not isinstance(dataset, Dataset):
        raise SpecError("spec.data.name", f"{spec.name} returned {type(dataset).__name__}, not a Dataset")
    return dataset


def check_data_spec(spec: Data) -> None:
    """Refuse options that the dataset's function does not take. This reads no data.

    Raises:
        SpecError: the name or an option is unknown, or the function cannot be imported.
    """
    function = _function(spec.name)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    known = [name for name in parameters if name not in _GIVEN]
    for name in spec.options:
        if name not in known:
            words = f"{spec.name} has no option {name}{meant(name, known)}: it takes {', '.join(known) or 'none'}"
            raise SpecError(f"spec.data.options.{name}", words)


def task_before_reading(spec: Data) -> Task | None:
    """The task of a built-in dataset, as its options say; None if it is known only after the data are read."""
    options, task = spec.options, spec.options.get("task")
    if spec.name == "huggingface":
        return as_task(task or (Task.NEXT_TOKEN if options.get("label") is None else Task.CLASS))
    return as_task(task or Task.NEXT_TOKEN) if spec.name == "text" else None


def makes_bytes(spec: Data) -> bool:
    """Whether a built-in dataset's options turn texts into bytes."""
    options = spec.options
    no_tokenizer = options.get("text") is not None and options.get("tokenizer") is None
    return spec.name == "text" or (spec.name == "huggingface" and no_tokenizer)


def _function(name: str) -> Callable[..., Dataset]:
    match name:
        case "digits":
            return load_digits
        case "text":
            return load_text
        case "huggingface":
            try:  # imported here, because the import takes seconds and needs an extra of the package
                from .huggingface import load_huggingface
            except ImportError as error:
                raise SpecError(
                    "spec.data.name", f"huggingface needs datasets: pip install pipetransformer[huggingface] ({error})"
                ) from error
            return load_huggingface
    return import_function(name, field="spec.data.name")
