"""`submit`: the jobs of a file go to the cluster."""

from typing import Annotated, Any

import typer

from pipetransformer_client.client import Client
from pipetransformer_client.job import Job

from .app import app
from .manifests import File, Name, Settings, all_jobs
from .options import EXIT_FAILED, Context, Namespace, Output, console
from .show import print_jobs, print_object
from .watch import watch_job


@app.command()
def submit(
    file: File,
    name: Name = None,
    settings: Settings = None,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch the job to its end.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    output: Output = None,
) -> None:
    """Create the jobs of a file on the cluster, after the checks that the cluster would make."""
    manifests = all_jobs(file, name, settings)
    for manifest in manifests:
        own = manifest["metadata"].get("namespace")
        if own and namespace and own != namespace:
            raise typer.BadParameter(f"--namespace {namespace}: the job's own namespace is {own}")
    if follow and len(manifests) > 1:
        raise typer.BadParameter(f"--watch shows one job, and the file holds {len(manifests)}: choose one with --name")
    jobs = []
    for manifest in manifests:
        jobs.append(_create(manifest, namespace, context))
        if output is None:
            console().print(f"{jobs[-1].namespace}/{jobs[-1].name} created", highlight=False)
    client = Client.connect(context=context, namespace=jobs[0].namespace)
    if output is None:
        if follow:
            watch_job(client, jobs[0].name)
        return
    if follow:
        jobs = [client.wait(jobs[0].name)]
    if len(jobs) == 1:  # one object, so that a program can read it
        print_object(jobs[0].manifest, output)
    else:
        print_jobs(jobs, output)
    if any(job.failure for job in jobs):
        raise typer.Exit(EXIT_FAILED)


def _create(manifest: dict[str, Any], namespace: str | None, context: str | None) -> Job:
    return Client.connect(context=context, namespace=namespace).submit(manifest)
