"""`kubectl_complete-pipetransformer`: what kubectl asks for the completions of its plugin.

It is called with the words so far, the last one perhaps empty, and answers one completion a line and then a directive,
as Cobra's commands do. The shells' own completion of `pipetransformer` is Typer's (`--install-completion`).
"""

import contextlib
import os
import shlex
import sys

from . import app

#: Of Cobra: let the shell add no file names.
_NO_FILES = ":4"


def main() -> None:
    """Answers kubectl."""
    words = ["pipetransformer", *sys.argv[1:]]
    os.environ["_PIPETRANSFORMER_COMPLETE"] = "complete_bash"  # Typer's protocol: a word a line
    os.environ |= {"COMP_WORDS": shlex.join(words), "COMP_CWORD": str(len(words) - 1)}
    with contextlib.suppress(SystemExit):
        app(prog_name="pipetransformer")
    print(_NO_FILES)


if __name__ == "__main__":
    main()
