"""`timeline`: a run as one picture and one page."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..client import Client
from . import app
from .options import EXIT_REFUSED, Context, Namespace, console, errors


@app.command()
def timeline(
    source: Annotated[str, typer.Argument(help="Folder of a run's record, else the name of a job.")],
    folder: Annotated[Path, typer.Argument(help="Where timeline.html and timeline.png go.")] = Path(),
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Draw a run, or what there is of it yet: layers over time, width, GPUs, loss and regroups."""
    try:
        from ..timeline import read, write
    except ModuleNotFoundError as error:
        errors().print(f"error: {error}: pip install pipetransformer-client[timeline]")
        raise typer.Exit(EXIT_REFUSED) from error
    try:
        if Path(source).is_dir():
            record, name = read(Path(source)), Path(source).resolve().name
        else:
            with tempfile.TemporaryDirectory() as scratch:
                client = Client.connect(context=context, namespace=namespace)
                record, name = read(client.fetch_record(source, Path(scratch))), source
    except ValueError as error:
        errors().print(f"error: {error}")
        raise typer.Exit(EXIT_REFUSED) from error
    for path in write(record, name, folder):
        console().print(f"{path.name}: {path}", highlight=False, soft_wrap=True)
