"""The command `pipetransformer`, also available as `kubectl pipetransformer`, with one module for each command.

Exit codes: 0 success, and the job has completed if the command waited for it; 1 the job failed; 2 invalid arguments or
an invalid job file; 3 the cluster refused or did not answer, or time ran out; 130 interrupted.
"""

import sys

from pipetransformer_client.errors import ClientError, InvalidName
from pipetransformer_contract.api.manifest import InvalidManifest

from . import change, checkpoint, fetch, logs, plan, run, show, submit, timeline, watch  # noqa: F401 - registers the commands
from .app import app
from .options import EXIT_CLUSTER, EXIT_INVALID, error_console


def main() -> None:
    """Runs the command line and exits."""
    try:
        app()
    except (InvalidManifest, InvalidName) as error:
        error_console().print(f"error: {error}")
        sys.exit(EXIT_INVALID)
    except (ClientError, TimeoutError) as error:
        error_console().print(f"error: {error}")
        sys.exit(EXIT_CLUSTER)
    except OSError as error:  # a file or folder in the arguments
        error_console().print(f"error: {error}")
        sys.exit(EXIT_INVALID)
