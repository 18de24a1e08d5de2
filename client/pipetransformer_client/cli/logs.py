"""`logs`: prints the logs of all workers."""

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
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs until the job ends.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Show at most this many recent lines per worker.")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print the merged logs of all workers, each line with its worker's rank."""
    out = console()
    for line in Client.connect(context=context, namespace=namespace).logs(name, follow=follow, tail=tail):
        rank = "-" if line.rank is None else str(line.rank)
        number = int(line.worker.rpartition("-w")[2])
        colour = _COLOURS[number % len(_COLOURS)]
        text = Text.assemble((f"{rank:>4} {line.worker}", colour), f" {line.text}")
        out.print(text, soft_wrap=True)
