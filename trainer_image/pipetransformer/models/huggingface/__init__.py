"""Models of Hugging Face transformers as lists of units. Only this folder imports the library, if a job needs it."""

from .build import (
    build_units,
    class_name,
    keep_processor,
    load_pretrained,
    load_trained,
    save_pretrained,
    shell,
)
from .configuration import check_before_data, widths

__all__ = [
    "build_units",
    "check_before_data",
    "class_name",
    "keep_processor",
    "load_pretrained",
    "load_trained",
    "save_pretrained",
    "shell",
    "widths",
]
