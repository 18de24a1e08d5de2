"""`fetch`: copies the trained model to this machine."""

from pathlib import Path
from typing import Annotated

import typer

from pipetransformer_client.client import Client

from .app import app
from .options import Context, JobName, Namespace, console


@app.command()
def fetch(
    name: JobName,
    folder: Annotated[Path, typer.Argument(help="New or empty folder for the model.", file_okay=False)],
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Copy a job's model to this machine."""
    model = Client.connect(context=context, namespace=namespace).fetch_model(name, folder)
    console().print(f"model: {model}", highlight=False, soft_wrap=True)
