"""`timeline`: draws a run as a picture and a page."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from pipetransformer_client.client import Client
from pipetransformer_client.errors import NotFound, Unavailable
from pipetransformer_client.timeline import read_record, write_timeline
from pipetransformer_contract.api.manifest import similar_path
from pipetransformer_contract.api.validate import is_name

from .app import app
from .completion import complete_record
from .options import EXIT_INVALID, Context, Namespace, console, error_console


@app.command()
def timeline(
    source: Annotated[
        str,
        typer.Argument(help="Folder of a run's record, or name of a job.", autocompletion=complete_record),
    ],
    folder: Annotated[
        Path, typer.Argument(help="Folder for timeline.html and timeline.svg.", file_okay=False)
    ] = Path(),
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Draw layouts, frozen layers, GPUs, speed, loss and accuracy over time. The run may still train."""
    try:
        if Path(source).is_dir():
            record, name = read_record(Path(source)), Path(source).resolve().name
        elif not is_name(source):  # it can only be meant as a folder
            raise NotADirectoryError(_no_folder(source))
        else:
            with tempfile.TemporaryDirectory() as scratch:
                record, name = read_record(_fetch(source, Path(scratch), namespace, context)), source
    except ValueError as error:
        error_console().print(f"error: {error}")
        raise typer.Exit(EXIT_INVALID) from error
    for path in write_timeline(record, name, folder):
        console().print(f"{path.name}: {path}", highlight=False, soft_wrap=True)


def _fetch(job: str, folder: Path, namespace: str | None, context: str | None) -> Path:
    try:
        return Client.connect(context=context, namespace=namespace).fetch_record(job, folder)
    except (NotFound, Unavailable) as error:  # the user may have meant a folder
        raise type(error)(f"{error}; and {_no_folder(job)}") from error


def _no_folder(source: str) -> str:
    return (
        f"{source} is a file, not a folder"
        if Path(source).exists()
        else (f"there is no folder {source}{similar_path(Path(source))}")
    )
