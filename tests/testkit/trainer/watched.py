"""Two ranks with watchdogs."""

import datetime
import threading

from pipetransformer.elastic.transport.connections import Connections
from pipetransformer.elastic.transport.groups import GenerationGroups, TCPStore, Transport, ensure_default_group

TRANSPORT = Transport("127.0.0.1", datetime.timedelta(seconds=60))


def pair(store: TCPStore, transport: Transport = TRANSPORT) -> list[GenerationGroups]:
    """The groups of two ranks in this process."""
    ensure_default_group()
    both = [GenerationGroups(connections=Connections(store.port)) for _ in range(2)]

    def meet(rank: int) -> None:
        client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=TRANSPORT.timeout)
        both[rank].meet(client, rank, 2, 0, transport)

    other = threading.Thread(target=meet, args=(1,))
    other.start()
    meet(0)
    other.join(30)
    return both
