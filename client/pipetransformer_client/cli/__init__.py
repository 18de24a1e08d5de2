"""The command `pipetransformer`, which kubectl knows as `kubectl pipetransformer`: one command a module.

Exit codes: 0 done, and the job, if it was waited for, is complete; 1 the job failed; 2 the arguments or the job's file
were refused; 3 the cluster said no or did not answer, or time ran out; 130 interrupted.
"""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from pipetransformer_client.errors import ClientError, InvalidName
from pipetransformer_contract.api.manifest import InvalidManifest

from .options import EXIT_CLUSTER, EXIT_REFUSED, errors

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


from . import change, fetch, logs, plan, run, show, submit, timeline, watch  # noqa: E402, F401 - they add their commands to the app


def main() -> None:
    """Runs the command line and exits."""
    try:
        app()
    except (InvalidManifest, InvalidName) as error:
        errors().print(f"error: {error}")
        sys.exit(EXIT_REFUSED)
    except (ClientError, TimeoutError) as error:
        errors().print(f"error: {error}")
        sys.exit(EXIT_CLUSTER)
    except OSError as error:  # a file or folder that was named
        errors().print(f"error: {error}")
        sys.exit(EXIT_REFUSED)
