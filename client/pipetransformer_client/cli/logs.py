"""`logs`: what all workers write, each line with the rank of its worker."""

from typing import Annotated

import typer
from rich.text import Text

from pipetransformer_client.client import Client

from .app import app
from .options import Context, JobName, Namespace, console

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red", "bright_cyan", "bright_green")


@app.command()
def logs(
    name: JobName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on to the job's end.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="So many lines of each worker at most.")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print the logs of all workers as one, each line with the rank of its worker."""
    out = console()
    for line in Client.connect(context=context, namespace=namespace).logs(name, follow=follow, tail=tail):
        rank = "-" if line.rank is None else str(line.rank)
        number = int(line.worker.rpartition("-w")[2])
        colour = _COLOURS[number % len(_COLOURS)]
        text = Text.assemble((f"{rank:>4} {line.worker}", colour), f" {line.text}")
        out.print(text, soft_wrap=True)
