"""Log lines of the operator: text, or JSON with one object a line."""

import logging
from enum import StrEnum

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter


class LogFormat(StrEnum):
    """How a log line is written."""

    TEXT = "Text"
    JSON = "Json"


#: Attributes that kopf adds to its records for its own use.
_OF_KOPF = ("settings", "k8s_skip")


def configure(level: str, form: LogFormat) -> None:
    """Has all loggers write to standard error.

    Args:
        level: lowest level of the lines.
        form: `JSON` gives objects with `timestamp` (UTC), `level`, `logger` and `message`. Those about one object of
            the cluster also have `object`, and those of an exception have `exc_info`.
    """
    handler = logging.StreamHandler()
    if form is LogFormat.JSON:
        handler.setFormatter(
            JsonFormatter(
                "{levelname}{name}{message}",
                style="{",
                timestamp=True,
                rename_fields={"levelname": "level", "name": "logger", "k8s_ref": "object"},
                reserved_attrs=[*RESERVED_ATTRS, *_OF_KOPF],
            )
        )
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
