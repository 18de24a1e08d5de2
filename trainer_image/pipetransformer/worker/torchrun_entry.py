"""Entry point `torchrun.handlers`: `torchrun --rdzv-backend=pipetransformer` takes its generations from the channel.

torch loads this module while it imports its own rendezvous package, so only functions may import that package.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

_JOIN_TIMEOUT_SECONDS = 600


def handler_creator() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    """Return `create_handler`. The entry point names this function; torch calls it once and registers the result."""
    return create_handler


def create_handler(params: "RendezvousParameters") -> "RendezvousHandler":
    """Make the handler of the worker that the `PIPETRANSFORMER_*` environment names; `join_timeout` is in seconds."""
    import datetime

    from pipetransformer.elastic.generations.channel_source import ChannelSource
    from pipetransformer.elastic.generations.rendezvous import host_store

    from .process import WorkerIdentity
    from .torchrun_agent import AgentRendezvousHandler

    identity = WorkerIdentity.from_environment()
    seconds = params.get_as_int("join_timeout", _JOIN_TIMEOUT_SECONDS) or _JOIN_TIMEOUT_SECONDS
    timeout = datetime.timedelta(seconds=seconds)
    store, address = host_store(identity.address, timeout)
    source = ChannelSource(identity.channel(), address, store)
    return AgentRendezvousHandler(identity.name, store, source, timeout=timeout)
