"""`python -m pipetransformer_operator`: the operator on a cluster, configured by its environment (see `settings`)."""

import asyncio
import gc
import logging
import sys

from .handlers import operate
from .kube.lease import LeaseLost
from .settings import Settings

#: New objects, collections of the young, and of the middle-aged, after which the next older ones are looked through.
#: Python's own 700 are for small programs: all pods and jobs are kept here, and a quarter of the time went into that.
#: Little waits for it: a connection leaves 1 kB of garbage.
_COLLECT_AFTER = (20_000, 20, 100)


def main() -> int:
    """Runs the operator and returns its exit code."""
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it says that each event was handled
    gc.freeze()  # what was imported stays
    gc.set_threshold(*_COLLECT_AFTER)
    try:
        asyncio.run(operate(settings))
    except LeaseLost as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
