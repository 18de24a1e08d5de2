"""`checkpoint now`: has a job write a checkpoint after its next step."""

from typing import Annotated

import typer

from pipetransformer_client.client import Client

from .app import app
from .options import Context, JobName, Namespace, console

checkpoint = typer.Typer(no_args_is_help=True, help="Checkpoints of a job.")
app.add_typer(checkpoint, name="checkpoint")


@checkpoint.command()
def now(
    name: JobName,
    token: Annotated[
        str | None, typer.Option("--token", help="Name of the request. The same name asks once. Default: a new one.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the checkpoint is durable.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Maximum time to wait in seconds. Default: no limit.")
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Have a job write a checkpoint after its next step, such as before a risky change of the cluster."""
    client = Client.connect(context=context, namespace=namespace)
    try:
        token = client.checkpoint_now(name, token)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console().print(f"{client.namespace}/{name} was asked for the checkpoint {token}", highlight=False)
    if wait:
        request = client.wait_for_checkpoint(name, token, timeout=timeout)
        console().print(f"{client.namespace}/{name} has a durable checkpoint of step {request.step}", highlight=False)
