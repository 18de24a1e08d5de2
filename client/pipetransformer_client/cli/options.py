"""Options that several commands share, exit codes, and consoles."""

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from .completion import complete_job

#: The job failed.
EXIT_FAILED = 1
#: The arguments or the job's file are invalid.
EXIT_INVALID = 2
#: The cluster refused or did not answer.
EXIT_CLUSTER = 3
EXIT_INTERRUPTED = 130
#: Columns of a file or a pipe. Rich would take 80, wrap longer lines and cut the cells of wider tables.
_WIDE = 100_000


class Format(StrEnum):
    """Format of output for programs."""

    JSON = "json"
    YAML = "yaml"


Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig. Default: the current one.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the job. Default: the context's.")
]
JobName = Annotated[str, typer.Argument(help="Name of the job.", autocompletion=complete_job)]
Output = Annotated[Format | None, typer.Option("--output", "-o", help="Print as json or yaml, for programs.")]


def console() -> Console:
    """A console on standard output. Text that looks like Rich's markup is printed as it is. In a file or a pipe lines
    and tables are as wide as they need."""
    out = Console(markup=False, emoji=False)
    return out if out.is_terminal else Console(markup=False, emoji=False, width=_WIDE)


def error_console() -> Console:
    """A console on standard error. Text is printed as it is, without markup and without wrapping lines."""
    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
