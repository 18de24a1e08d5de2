"""`timeline`: a run as one picture and one page."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from pipetransformer_client.client import Client
from pipetransformer_client.errors import NotFound, Unavailable
from pipetransformer_client.timeline import read, write
from pipetransformer_contract.api.manifest import similar_path
from pipetransformer_contract.api.validate import is_name

from .app import app
from .completion import complete_record
from .options import EXIT_REFUSED, Context, Namespace, console, errors


@app.command()
def timeline(
    source: Annotated[
        str,
        typer.Argument(help="Folder of a run's record, or the name of a job.", autocompletion=complete_record),
    ],
    folder: Annotated[Path, typer.Argument(help="Where timeline.html and timeline.svg go.", file_okay=False)] = Path(),
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Draw a run, also while it trains: layouts, frozen layers, GPUs, speed, loss and accuracy over time."""
    try:
        if Path(source).is_dir():
            record, name = read(Path(source)), Path(source).resolve().name
        elif not is_name(source):  # then it was meant as a folder
            raise NotADirectoryError(_no_folder(source))
        else:
            with tempfile.TemporaryDirectory() as scratch:
                record, name = read(_fetch(source, Path(scratch), namespace, context)), source
    except ValueError as error:
        errors().print(f"error: {error}")
        raise typer.Exit(EXIT_REFUSED) from error
    for path in write(record, name, folder):
        console().print(f"{path.name}: {path}", highlight=False, soft_wrap=True)


def _fetch(job: str, folder: Path, namespace: str | None, context: str | None) -> Path:
    try:
        return Client.connect(context=context, namespace=namespace).fetch_record(job, folder)
    except (NotFound, Unavailable) as error:  # a folder may have been meant
        raise type(error)(f"{error}; and {_no_folder(job)}") from error


def _no_folder(source: str) -> str:
    return (
        f"{source} is a file, not a folder"
        if Path(source).exists()
        else (f"there is no folder {source}{similar_path(Path(source))}")
    )
