"""Options that several commands share, the exit codes, and how a command gets its client."""

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from .completion import complete_job

#: The job failed.
EXIT_FAILED = 1
#: The arguments or the job's file were refused.
EXIT_REFUSED = 2
#: The cluster said no or did not answer.
EXIT_CLUSTER = 3
EXIT_INTERRUPTED = 130


class Format(StrEnum):
    """Of an output that a program reads."""

    JSON = "json"
    YAML = "yaml"


Context = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig, by default the present one.")
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the job, by default the context's.")
]
JobName = Annotated[str, typer.Argument(help="Name of the job.", autocompletion=complete_job)]
Output = Annotated[Format | None, typer.Option("--output", "-o", help="For programs.")]


def console() -> Console:
    """Writes to standard output; text that looks like markup, as parts of messages do, is text."""
    return Console(markup=False, emoji=False)


def errors() -> Console:
    """Writes to standard error, lines whole and as they are."""
    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
