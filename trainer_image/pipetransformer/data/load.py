"""Finds a dataset by the name in the spec."""

from collections.abc import Callable

import torch

from pipetransformer_contract.spec import Data

from ..errors import SpecError
from ..imports import import_function
from .dataset import Dataset
from .digits import load_digits
from .text import load_text


def load_dataset(spec: Data, *, dtype: torch.dtype) -> Dataset:
    """The dataset with floating-point inputs in `dtype`.

    A function, ours or imported, is called with `path` (empty when the spec has none), `dtype` and the spec's options.

    Raises:
        SpecError: the name is unknown or does not import (`InvalidSpec`), or the data cannot be read
        (`DataUnreadable`).
    """
    function = _function(spec.name)
    try:
        dataset = function(path=spec.path, dtype=dtype, **spec.options)
    except SpecError:
        raise
    except Exception as error:
        field = "spec.data.path" if spec.path else "spec.data.options"
        raise SpecError(field, f"{spec.name}: {type(error).__name__}: {error}", reason="DataUnreadable") from error
    if not isinstance(dataset, Dataset):
        raise SpecError("spec.data.name", f"{spec.name} returned {type(dataset).__name__}, not a Dataset")
    return dataset


def _function(name: str) -> Callable[..., Dataset]:
    match name:
        case "digits":
            return load_digits
        case "text":
            return load_text
        case "huggingface":
            try:  # takes seconds to import and is an extra
                from .huggingface import load_huggingface
            except ImportError as error:
                raise SpecError(
                    "spec.data.name", f"huggingface needs datasets: pip install pipetransformer[huggingface] ({error})"
                ) from error
            return load_huggingface
    return import_function(name, field="spec.data.name")
