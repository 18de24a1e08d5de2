"""Finds a dataset by the name in the spec."""

import torch

from pipetransformer_contract.spec import Data

from ..errors import SpecError
from ..imports import import_function
from .dataset import Dataset
from .digits import load_digits


def load_dataset(spec: Data, *, dtype: torch.dtype) -> Dataset:
    """The dataset with inputs in `dtype`.

    An imported function is called with `path` (empty when the spec has none), `dtype` and the spec's options.

    Raises:
        SpecError: the name is unknown or does not import (`InvalidSpec`), or the data cannot be read
        (`DataUnreadable`).
    """
    if spec.name == "digits":
        return load_digits(dtype=dtype)
    function = import_function(spec.name, field="spec.data.name")
    try:
        dataset = function(path=spec.path, dtype=dtype, **spec.options)
    except Exception as error:
        field = "spec.data.path" if spec.path else "spec.data.options"
        raise SpecError(field, f"{spec.name}: {type(error).__name__}: {error}", reason="DataUnreadable") from error
    if not isinstance(dataset, Dataset):
        raise SpecError("spec.data.name", f"{spec.name} returned {type(dataset).__name__}, not a Dataset")
    return dataset
