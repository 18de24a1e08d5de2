"""Reads what a trainer leaves when it ends: its own report, one line of JSON, or else the end of its log.

The kubelet gives the log where there is no report (`FallbackToLogsOnError`). A few words of it are kept.
"""

import json
import re
from itertools import dropwhile

#: Characters of one worker in a message about several.
MAX_WORDS = 200
#: Exit codes of a process that its kubelet ended, or that used too much memory: it cannot say why. Local ones are
#: negative.
_KILLED = (137, 143, -9, -15)
_FRAME = re.compile(r'  File ".*", line \d+')


def report_in(message: str) -> dict[str, object]:
    """The trainer's own report; empty if the message is not one, as after a crash."""
    try:
        line = json.loads(message.strip().rpartition("\n")[2] or "{}")
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) and "outcome" in line else {}  # a program may log in JSON


def last_words(left: str, exit_code: int) -> str:
    """The trainer's report as it is, or the end of its log in one line.

    After a traceback that is its error, otherwise as many whole lines as fit.
    """
    if report_in(left):
        return left
    if exit_code in _KILLED:
        return ""
    lines = list(filter(None, map(str.rstrip, left.splitlines())))
    if error := _error(lines):
        return _cut(error)
    while len(lines) > 1 and len(_cut(lines, None)) > MAX_WORDS:
        lines.pop(0)
    return _cut(lines)


def _error(lines: list[str]) -> list[str]:
    """The lines from the last traceback's error on; empty without a traceback that ends."""
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    after_frames = lines[frames[-1] :] if frames else []
    return list(dropwhile(lambda line: line.startswith(" "), after_frames))


def _cut(lines: list[str], most: int | None = MAX_WORDS) -> str:
    return " ".join(" ".join(lines).split())[:most]
