"""`python -m pipetransformer_operator`: the operator on a cluster, configured by its environment (see `settings`).

With the argument `release-budgets` it only deletes the budgets that an operator has left, as at the end of a release.
"""

import asyncio
import gc
import logging
import os
import sys

from .handlers import operate
from .kube.client.api import Api
from .kube.client.lease import LeaseLost
from .kube.workers.protection import release_budgets
from .settings import Settings, served_namespaces

#: New objects, collections of the young, and of the middle-aged, after which the next older ones are looked through.
#: Python's own 700 are for small programs: all pods and jobs are kept here, and a quarter of the time went into that.
#: Little waits for it: a connection leaves 1 kB of garbage.
_COLLECT_AFTER = (20_000, 20, 100)
#: The API server takes objects that are nested 10,000 deep in what a schema leaves open, and kopf ends the process when
#: one cannot be read, and after a restart again. The decoder takes some 400 bytes of an 8 MB stack for each.
_RECURSION = 40_000


RELEASE_BUDGETS = "release-budgets"


def main() -> int:
    """Runs what the command line asks for and returns its exit code."""
    if sys.argv[1:] == [RELEASE_BUDGETS]:
        return release()
    return run()


def release() -> int:
    """Deletes the budgets of all jobs, in the namespaces that the environment names, and returns the exit code."""
    namespaces = served_namespaces(os.environ)

    async def connect_and_release() -> None:
        api = await Api.connect()
        try:
            await release_budgets(api, namespaces)
        finally:
            await api.close()

    asyncio.run(connect_and_release())
    return 0


def run() -> int:
    """Runs the operator and returns its exit code."""
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it says that each event was handled
    sys.setrecursionlimit(_RECURSION)
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
