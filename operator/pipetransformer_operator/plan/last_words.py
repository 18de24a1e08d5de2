"""What a trainer leaves when it ends: a report of its own, one line of JSON, or only its log, whose end the kubelet
gives where there is no report (`FallbackToLogsOnError`). A report that is there holds; of a log a few words are kept.
"""

import json
import re

#: Characters of one worker, among others.
MAX_WORDS = 200
#: Of a process that was ended by its kubelet, or for its memory: it cannot say why. A local one's are negative.
_KILLED = (137, 143, -9, -15)
_FRAME = re.compile(r'  File ".*", line \d+')


def report_in(message: str) -> dict[str, object]:
    """The trainer's own report; empty where the message is none, as after a crash."""
    try:
        line = json.loads(message.strip().rpartition("\n")[2] or "{}")
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) and "outcome" in line else {}  # a program may log in JSON


def last_words(left: str, exit_code: int) -> str:
    """What is worth keeping of what a trainer left: its report as it is, or the end of its log, in one line.

    After a traceback that is its error, else as many whole lines as there is room for.
    """
    if report_in(left):
        return left
    if exit_code in _KILLED:
        return ""
    lines = [line.rstrip() for line in left.splitlines() if line.strip()]
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if frames and (error := [number for number in range(frames[-1], len(lines)) if not lines[number].startswith(" ")]):
        return _cut(lines[error[0] :])
    while len(lines) > 1 and len(_cut(lines, None)) > MAX_WORDS:
        lines.pop(0)
    return _cut(lines)


def _cut(lines: list[str], most: int | None = MAX_WORDS) -> str:
    return " ".join(" ".join(lines).split())[:most]
