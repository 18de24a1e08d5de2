"""Reads the termination message of a trainer: its own report (one line of JSON), otherwise the end of its log.

The kubelet gives the log if there is no report (`FallbackToLogsOnError`). Messages quote only a few words of it.
"""

import json
import re
from itertools import dropwhile

#: Maximum characters about one worker in a message about several workers.
MAX_WORKER_CHARACTERS = 200
#: Exit codes of a process that a signal killed, for example because it used too much memory. Such a process cannot say
#: why. Local processes have negative codes.
_KILLED = (137, 143, -9, -15)
_FRAME = re.compile(r'  File ".*", line \d+')


def report_in(message: str) -> dict[str, object]:
    """The trainer's own report in a termination message; empty if the message is not a report, as after a crash."""
    if not message:  # a worker that runs has none
        return {}
    try:
        line = json.loads(message.strip().rpartition("\n")[2])
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) and "outcome" in line else {}  # a program may log in JSON


def last_words(left: str, exit_code: int) -> str:
    """The trainer's report unchanged, or the end of its log in one line of at most `MAX_WORKER_CHARACTERS` characters.

    If the log has a traceback, the result is the traceback's error. Otherwise it is as many of the last lines as fit.
    It is empty if a signal killed the trainer.

    Args:
        left: the trainer's termination message.
        exit_code: exit code of the trainer's process.
    """
    if report_in(left):
        return left
    if exit_code in _KILLED:
        return ""
    lines = list(filter(None, map(str.rstrip, left.splitlines())))
    if error := _error(lines):
        return _cut(error)
    while len(lines) > 1 and len(_cut(lines, None)) > MAX_WORKER_CHARACTERS:
        lines.pop(0)
    return _cut(lines)


def _error(lines: list[str]) -> list[str]:
    """The lines from the error of the last traceback on; empty without a complete traceback."""
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    after_frames = lines[frames[-1] :] if frames else []
    return list(dropwhile(lambda line: line.startswith(" "), after_frames))


def _cut(lines: list[str], most: int | None = MAX_WORKER_CHARACTERS) -> str:
    return " ".join(" ".join(lines).split())[:most]
