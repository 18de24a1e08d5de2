"""Passes the list of members from a generation's leader to the other workers, so that the operator need not send it.

The leader puts the whole generation into the store that it hosts. A worker that has the operator's notice reads the
generation there, under the job's UID, the number and the nonce of the notice.
"""

import datetime
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from pipetransformer.elastic.transport.connections import Connections, Opening
from pipetransformer.elastic.transport.groups import PrefixStore, Store, TCPStore
from pipetransformer_contract.messages import Generation, GenerationNotice

_KEY = "members"
#: Timeout of one attempt to reach the leader's store, and the pause between two attempts.
CONNECT_TIMEOUT = datetime.timedelta(seconds=0.5)
RETRY_SECONDS = 0.02
#: Longest wait for the list in one call. Between two calls a worker checks whether it still needs the list.
_WAIT = datetime.timedelta(seconds=1)


def generation_store(generation: Generation | GenerationNotice, store: Store) -> Store:
    """Return the part of the leader's store that only this generation uses."""
    return PrefixStore(f"{generation.job_uid}/{generation.layout_generation}/{generation.nonce}", store)


def share_if_leader(generation: Generation, worker: str, own_store: Store) -> None:
    """On the generation's leader, put the generation into the store that the leader hosts."""
    if generation.leader == worker:
        content = generation.model_dump_json(by_alias=True).encode()
        generation_store(generation, own_store).set(_KEY, zlib.compress(content))  # type: ignore[arg-type]


def forget_shared(store: Store) -> None:
    """Delete the generation from `generation_store`, once all participants have met. Otherwise it would stay as long as
    the leader's process lives."""
    store.delete_key(_KEY)


def read_shared(notice: GenerationNotice, seconds: float, unwanted: Callable[[], bool]) -> Generation | None:
    """Read the generation from its leader's store.

    Args:
        notice: the operator's notice of the generation.
        seconds: how long to wait for the leader's list.
        unwanted: returns whether the list is no longer needed, for example because a newer generation is published.

    Returns:
        The generation. None if the list does not arrive in time, is unreadable, is of another generation, or is no
        longer needed.
    """
    deadline = time.monotonic() + seconds
    store: Store | None = None
    while (left := deadline - time.monotonic()) > 0 and not unwanted():
        try:
            store = store or generation_store(notice, _client(notice.leader.address, left))
            store.wait([_KEY], min(_WAIT, datetime.timedelta(seconds=left)))
            generation = Generation.model_validate_json(zlib.decompress(store.get(_KEY)))
        except (dist.DistNetworkError, OSError):
            store = None
            time.sleep(RETRY_SECONDS)
        except dist.DistStoreError:
            continue  # the leader does not have the list yet
        except (ValueError, zlib.error):
            return None
        else:
            return generation if notice.announces(generation) else None
    return None


def _client(address: str, seconds: float) -> TCPStore:
    return Connections().connect(ClientOpening(address, CONNECT_TIMEOUT), seconds)


@dataclass(frozen=True)
class ClientOpening(Opening[TCPStore]):
    """Makes a client of a store.

    Attributes:
        address: host:port of the store.
        timeout: for the attempt to connect, and then for each of the client's operations.
    """

    address: str
    timeout: datetime.timedelta

    def make(self) -> TCPStore:
        """Connect.

        Raises:
            dist.DistNetworkError, OSError: no store listens there.
        """
        host, port = split_address(self.address)
        # Try the port first, because a client that cannot connect retries for seconds and cannot be stopped.
        socket.create_connection((host, port), self.timeout.total_seconds()).close()
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self.timeout)


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` into host and port. An IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
