"""The command `pipetransformer`, which kubectl knows as `kubectl pipetransformer`: one command a module.

Exit codes: 0 done, and the job, if it was waited for, is complete; 1 the job failed; 2 the arguments or the job's file
were refused; 3 the cluster said no or did not answer, or time ran out; 130 interrupted.
"""

import sys

from pipetransformer_client.errors import ClientError, InvalidName
from pipetransformer_contract.api.manifest import InvalidManifest

from . import change, fetch, logs, plan, run, show, submit, timeline, watch  # noqa: F401 - they add their commands to the app
from .app import app
from .options import EXIT_CLUSTER, EXIT_REFUSED, errors


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
