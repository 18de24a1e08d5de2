"""`suspend`, `resume`, `scale` and `delete`: change a job on the cluster."""

from typing import Annotated

import typer

from pipetransformer_client.client import Client
from pipetransformer_contract.words import counted

from .app import app
from .options import Context, JobName, Namespace, console


@app.command()
def suspend(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Release all workers of a job after a checkpoint. `resume` continues from it."""
    client = Client.connect(context=context, namespace=namespace)
    client.suspend(name)
    console().print(f"{client.namespace}/{name} suspended", highlight=False)


@app.command()
def resume(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Resume a suspended job from its newest checkpoint."""
    client = Client.connect(context=context, namespace=namespace)
    client.resume(name)
    console().print(f"{client.namespace}/{name} resumed", highlight=False)


@app.command()
def scale(
    name: JobName,
    max_workers: Annotated[int, typer.Argument(min=1, help="Maximum number of workers.")],
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Set the maximum number of workers of a job. The job takes the largest layout that fits."""
    client = Client.connect(context=context, namespace=namespace)
    client.scale(name, max_workers)
    console().print(f"{client.namespace}/{name} scaled to at most {counted(max_workers, 'worker')}", highlight=False)


@app.command()
def delete(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Delete a job and its workers."""
    client = Client.connect(context=context, namespace=namespace)
    client.delete(name)
    console().print(f"{client.namespace}/{name} deleted", highlight=False)
