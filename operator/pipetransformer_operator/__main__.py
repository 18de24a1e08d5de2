"""`python -m pipetransformer_operator`: the operator on a cluster, configured by its environment (see `settings`)."""

import asyncio
import logging
import sys

from .handlers import operate
from .kube.lease import LeaseLost
from .settings import Settings


def main() -> int:
    """Runs the operator and returns its exit code."""
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it says that each event was handled
    try:
        asyncio.run(operate(settings))
    except LeaseLost as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
