"""Log lines of operator and workers: text, or JSON with one object a line."""

import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from .wire import Env


class LogFormat(StrEnum):
    """How a log line is written."""

    TEXT = "Text"
    JSON = "Json"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LogFormat":
        """The value of `Env.LOG_FORMAT`; text if it is not set.

        Raises:
            ValueError: it is invalid; the message names the variable.
        """
        value = environment.get(Env.LOG_FORMAT, cls.TEXT)
        try:
            return cls(value)
        except ValueError:
            raise ValueError(f"{Env.LOG_FORMAT}: expected one of {', '.join(cls)}, found {value!r}") from None


def configure(
    level: str,
    form: LogFormat,
    *,
    fields: Mapping[str, str] | None = None,
    renamed: Mapping[str, str] | None = None,
    hidden: Sequence[str] = (),
) -> None:
    """Has all loggers write to standard error. Does nothing if a program has set up its own logging.

    Args:
        level: lowest level of the lines.
        form: `JSON` gives objects with `timestamp` (UTC), `level`, `logger` and `message`, and those of an exception
            also with `exc_info`.
        fields: more fields of each object.
        renamed: other names of attributes of records.
        hidden: attributes of records that are not written.
    """
    handler = logging.StreamHandler()
    if form is LogFormat.JSON:
        handler.setFormatter(
            JsonFormatter(
                "{levelname}{name}{message}",
                style="{",
                timestamp=True,
                rename_fields={"levelname": "level", "name": "logger", **(renamed or {})},
                static_fields=dict(fields or {}),
                reserved_attrs=[*RESERVED_ATTRS, *hidden],
            )
        )
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
