"""Log lines as text and as JSON."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipetransformer_contract import logs
from pipetransformer_contract.logs import LogFormat
from pipetransformer_operator.__main__ import KOPF_OBJECT, KOPF_OWN


@contextmanager
def new_loggers() -> Iterator[None]:
    """Loggers as in a new process; pytest's own handlers come back afterwards."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_json_line_holds_an_exception_and_the_object_that_kopf_names(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("some.part")
    of_kopf = {"k8s_ref": {"name": "job", "namespace": "team"}, "settings": object(), "k8s_skip": True}

    with new_loggers():
        logs.configure("INFO", LogFormat.JSON, fields={"worker": "job-w1"}, renamed=KOPF_OBJECT, hidden=KOPF_OWN)
        logger.info("a worker %s\nis gone", "job-3", extra=of_kopf)
        try:
            raise OSError("disk full")
        except OSError:
            logger.exception("cannot write")
        logger.debug("too much detail")

    first, second = map(json.loads, lines(capsys))
    assert {key: first[key] for key in first.keys() - {"timestamp"}} == {
        "level": "INFO",
        "logger": "some.part",
        "message": "a worker job-3\nis gone",
        "object": {"name": "job", "namespace": "team"},
        "worker": "job-w1",
    }
    assert first["timestamp"].endswith("+00:00")
    assert second["level"] == "ERROR"
    assert "OSError: disk full" in second["exc_info"]


def test_a_text_line_names_level_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    with new_loggers():
        logs.configure("WARNING", LogFormat.TEXT)
        logging.getLogger("some.part").warning("late by %d s", 3)
        logging.getLogger("some.part").info("all is well")
    (line,) = lines(capsys)
    assert line.endswith("WARNING some.part: late by 3 s")


def test_an_unknown_format_is_refused_with_its_variable() -> None:
    assert LogFormat.from_environment({}) is LogFormat.TEXT
    assert LogFormat.from_environment({"PIPETRANSFORMER_LOG_FORMAT": "Json"}) is LogFormat.JSON
    with pytest.raises(ValueError, match=r"PIPETRANSFORMER_LOG_FORMAT: expected one of Text, Json, found 'xml'"):
        LogFormat.from_environment({"PIPETRANSFORMER_LOG_FORMAT": "xml"})
