"""`python -m pipetransformer` runs a worker, which only environment variables configure (`contract.wire.Env`).

`python -m pipetransformer predict FOLDER` runs a finished model instead.
"""

import logging
import os
import sys

from .worker.process import EXIT_WORKER, WorkerIdentity, run_worker


def main() -> None:
    """Run this worker and exit with its code."""
    try:
        code = run_worker(WorkerIdentity.from_environment()).exit_code
    except SystemExit as error:  # a signal arrived while the worker waited
        code = error.code if isinstance(error.code, int) else EXIT_WORKER
    logging.shutdown()
    sys.stdout.flush()
    # Skip the interpreter's shutdown, because threads of the store's server and of gloo may still answer other workers.
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:2] == ["predict"]:
        from .library import predict

        predict.main(sys.argv[2:])
    else:
        main()
