"""Imports functions that a user names as `module:attribute`. Every failure becomes a `SpecError`."""

import importlib
from collections.abc import Callable
from typing import Any

from .errors import SpecError


def import_function(path: str, *, field: str) -> Callable[..., Any]:
    """The callable at `module:attribute`.

    Raises:
        SpecError: the path is malformed, its module cannot be imported, or the attribute is not callable.
    """
    module_name, separator, attribute = path.partition(":")
    if not separator or not attribute:
        raise SpecError(field, f"{path!r} is neither a known name nor module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise SpecError(field, f"cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise SpecError(field, f"{module_name!r} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]
