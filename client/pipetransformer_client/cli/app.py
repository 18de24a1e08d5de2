"""The Typer application. Each command registers with it."""

from importlib.metadata import version
from typing import Annotated

import typer

app = typer.Typer(
    name="pipetransformer",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pipetransformer {version('pipetransformer-client')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Elastic pipeline training on Kubernetes: submit jobs, watch them shrink, fetch their models."""
