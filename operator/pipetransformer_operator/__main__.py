"""`python -m pipetransformer_operator`: the operator on a cluster, configured by its environment (see `settings`).

With the argument `release-budgets` it only deletes the jobs' PodDisruptionBudgets, as when the chart is uninstalled.
"""

import asyncio
import gc
import logging
import os
import sys

from pipetransformer_contract import logs

from .controller.ports import Unavailable
from .handlers import operate
from .kube.client.api import Api, NotFound
from .kube.client.lease import LeaseLost
from .kube.workers.protection import release_budgets
from .service import CannotStart
from .settings import Settings, served_namespaces

#: Thresholds of the garbage collector for its three generations. With Python's own threshold of 700 new objects, the
#: collector took a quarter of the process's time, because all pods and jobs are in memory. Little garbage waits for it:
#: 1 kB for each connection.
_COLLECT_AFTER = (20_000, 20, 100)
#: The API server accepts objects that are nested 10,000 levels deep where a schema allows any content. kopf ends the
#: process if it cannot read one, and again after each restart. The decoder needs 400 bytes of an 8 MB stack a level.
_RECURSION = 40_000
RELEASE_BUDGETS = "release-budgets"
#: Attributes that kopf adds to its log records: one names the object, and the others are for its own use.
KOPF_OBJECT = {"k8s_ref": "object"}
KOPF_OWN = ("settings", "k8s_skip")


def main() -> int:
    """Runs what the command line asks for and returns its exit code."""
    arguments = sys.argv[1:]
    if arguments == [RELEASE_BUDGETS]:
        return release()
    if arguments:  # such as a misspelled one: to run the operator instead would be a surprise
        print(f"error: expected {RELEASE_BUDGETS} or no argument, found {' '.join(arguments)}", file=sys.stderr)
        return 2
    return run()


def release() -> int:
    """Deletes the budgets of all jobs in the namespaces of the environment. Returns the exit code."""
    namespaces = served_namespaces(os.environ)

    async def connect_and_release() -> None:
        api = await Api.connect()
        try:
            await release_budgets(api, namespaces)
        finally:
            await api.close()

    try:
        asyncio.run(connect_and_release())
    except (NotFound, Unavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run() -> int:
    """Runs the operator and returns its exit code."""
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logs.configure(settings.log_level, settings.log_format, renamed=KOPF_OBJECT, hidden=KOPF_OWN)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it logs every handled event
    sys.setrecursionlimit(_RECURSION)
    gc.freeze()  # imported modules stay
    gc.set_threshold(*_COLLECT_AFTER)
    try:
        asyncio.run(operate(settings))
    except (CannotStart, LeaseLost) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
