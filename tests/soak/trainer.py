"""A trainer's process, forked from a server that has imported torch."""

import os
from collections.abc import Mapping

from tests.testkit.forked import begin

#: The control plane, the operator and the nodes' leases come first where all share a few cores.
_NICE = 5


def train(environment: Mapping[str, str], log: str) -> None:
    """Runs a worker with this environment; what it prints goes to the file."""
    begin()
    os.nice(_NICE)
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    from pipetransformer.__main__ import main

    main()
