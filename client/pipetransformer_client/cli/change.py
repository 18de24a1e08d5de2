"""`suspend`, `resume`, `scale` and `delete`: changes of a job that is on the cluster."""

from typing import Annotated

import typer

from pipetransformer_client.client import Client

from .app import app
from .options import Context, JobName, Namespace, console


@app.command()
def suspend(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Give all workers of a job back, after a checkpoint. `resume` starts it again from there."""
    client = Client.connect(context=context, namespace=namespace)
    client.suspend(name)
    console().print(f"{client.namespace}/{name} suspended", highlight=False)


@app.command()
def resume(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Start a suspended job again, from its newest checkpoint."""
    client = Client.connect(context=context, namespace=namespace)
    client.resume(name)
    console().print(f"{client.namespace}/{name} resumed", highlight=False)


@app.command()
def scale(
    name: JobName,
    max_workers: Annotated[int, typer.Argument(min=1, help="Workers that the job may have at most.")],
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Set how many workers a job may have at most. It takes the largest layout below that."""
    client = Client.connect(context=context, namespace=namespace)
    client.scale(name, max_workers)
    console().print(f"{client.namespace}/{name} scaled to at most {max_workers} workers", highlight=False)


@app.command()
def delete(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Delete a job and its workers."""
    client = Client.connect(context=context, namespace=namespace)
    client.delete(name)
    console().print(f"{client.namespace}/{name} deleted", highlight=False)
