"""What is kept of the end of a log."""

import pytest

from pipetransformer_operator.plan.last_words import MAX_WORKER_CHARACTERS, last_words

TRACEBACK = """\
 torch/x.py", line 3, in cut_off
Traceback (most recent call last):
  File "/app/train.py", line 3, in <module>
    import vit
  File "/app/vit.py", line 1, in <module>
    from einops import rearrange
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
ModuleNotFoundError: No module named 'einops'
"""
USAGE = f"usage: train.py [-h] {'[--lr LR] ' * 30}\ntrain.py: error: unrecognized arguments: --epoch\n"
SYNTAX = '  File "/app/train.py", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
SEVERAL = (
    f'{TRACEBACK}\nDuring handling of it:\n  File "a.py", line 1, in f\n    f()\npkg.Error: 1 wrong\nx\n  {"y" * 300}'
)
MISSING = "python: can't open file '/app/train.py': [Errno 2] No such file or directory"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (TRACEBACK, "ModuleNotFoundError: No module named 'einops'"),
        (f"{TRACEBACK}[W] a process group was not destroyed\n", "ModuleNotFoundError: No module named 'einops' [W] a"),
        (SYNTAX, "SyntaxError: invalid syntax"),
        (SEVERAL, "pkg.Error: 1 wrong x yyyy"),
        (MISSING, MISSING),
        (USAGE, "train.py: error: unrecognized arguments: --epoch"),
        ("terminate called\n\n  what():  no memory\n", "terminate called what(): no memory"),
        (f"ValueError: {'x' * 300}", "ValueError: xxx"),
        ('  File "a.py", line 1, in f\n    f()', 'File "a.py", line 1, in f f()'),
        ("", ""),
    ],
    ids=["import", "after", "syntax", "lines", "missing", "usage", "abort", "long", "cut", "none"],
)
def test_the_last_error_of_a_log_is_kept_from_its_beginning_else_its_last_lines(log: str, words: str) -> None:
    kept = last_words(log, 1)
    assert kept.startswith(words) and len(kept) <= MAX_WORKER_CHARACTERS
    assert bool(kept) == bool(words)


def test_what_was_killed_does_not_explain_itself_and_a_report_is_kept_as_it_is() -> None:
    assert last_words("INFO generation 3", 137) == last_words("INFO generation 3", -9) == ""
    report = '{"outcome": "Failed", "reason": "Stopped", "message": "%s"}\n' % ("told to stop " * 30)
    assert last_words(report, 143) == report
    assert last_words('{"level": "error", "message": "no"}', 1) == '{"level": "error", "message": "no"}'
