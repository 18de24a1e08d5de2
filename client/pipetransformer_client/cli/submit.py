"""`submit`: creates the jobs of a file on the cluster."""

from typing import Annotated, Any

import typer

from pipetransformer_client.client import Client
from pipetransformer_client.errors import ClientError
from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_contract.api.template import location_warnings

from .app import app
from .manifests import File, Name, Settings, all_jobs
from .options import EXIT_FAILED, Context, Format, Namespace, Output, console, error_console
from .output import print_jobs, print_manifests
from .watch import watch_job


@app.command()
def submit(
    file: File,
    name: Name = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check the jobs, without a cluster.")] = False,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch the job until it ends.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    output: Output = None,
) -> None:
    """Create the jobs of a file on the cluster. They are checked first, as the cluster checks them."""
    manifests = all_jobs(file, name, settings)
    for manifest in manifests:
        own = manifest["metadata"].get("namespace")
        if own and namespace and own != namespace:
            raise typer.BadParameter(f"--namespace {namespace}: the manifest's namespace is {own}")
    if follow and len(manifests) > 1:
        raise typer.BadParameter(f"--watch shows one job, but the file holds {len(manifests)}: choose one with --name")
    if dry_run:
        _print_checked(manifests, output)
        return
    client, jobs = Client.connect(context=context, namespace=namespace), []
    try:
        for manifest in manifests:
            jobs.append(client.submit(manifest))
            _warn(manifest)
            if output is None:
                console().print(f"{jobs[-1].namespace}/{jobs[-1].name} created", highlight=False)
    except ClientError:
        if output is not None and jobs:  # a program reads which jobs there are
            print_jobs(jobs, output)
        raise
    client.namespace = jobs[0].namespace  # a manifest may name another one
    if output is None:
        if follow:
            watch_job(client, jobs[0].name)
        return
    if follow:
        jobs = [client.wait(jobs[0].name)]
    print_manifests([job.manifest for job in jobs], output)
    if any(job.failure for job in jobs):
        raise typer.Exit(EXIT_FAILED)


def _print_checked(manifests: list[dict[str, Any]], output: Format | None) -> None:
    for manifest in manifests:
        _warn(manifest)
        if output is None:
            console().print(f"{manifest['metadata']['name']} is valid (dry run)", highlight=False)
    if output is not None:
        print_manifests(manifests, output)


def _warn(manifest: dict[str, Any]) -> None:
    """Warns of what is valid in a job, but probably not what its user wants."""
    for warning in location_warnings(PipeTrainingJob.from_manifest(manifest).spec):
        error_console().print(f"warning: {warning}")
