"""`submit` and `delete`."""

from pathlib import Path
from typing import Annotated

import typer

from pipetransformer_operator.local.manifest import read_manifest

from ..client import Client
from . import app
from .options import EXIT_FAILED, Context, JobName, Namespace, Output, console
from .show import print_object
from .watch import watch_job


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="YAML of one PipeTrainingJob.")],
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch the job to its end.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    output: Output = None,
) -> None:
    """Create a job on the cluster, after the checks that the cluster would make."""
    manifest = read_manifest(file)
    own = manifest["metadata"].get("namespace")
    if own and namespace and own != namespace:
        raise typer.BadParameter(f"--namespace {namespace}: the job's own namespace is {own}")
    job = Client.connect(context=context, namespace=namespace).submit(manifest)
    client = Client.connect(context=context, namespace=job.namespace)
    if output is not None:  # one object, so that a program can read it
        if follow:
            job = client.wait(job.name)
        print_object(job.manifest, output)
        if job.failure:
            raise typer.Exit(EXIT_FAILED)
        return
    console().print(f"{job.namespace}/{job.name} created", highlight=False)
    if follow:
        watch_job(client, job.name)


@app.command()
def delete(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Delete a job and its workers."""
    client = Client.connect(context=context, namespace=namespace)
    client.delete(name)
    console().print(f"{client.namespace}/{name} deleted", highlight=False)
