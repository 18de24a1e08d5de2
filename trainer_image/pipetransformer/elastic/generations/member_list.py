"""How the members of a generation learn of each other: the leader hands the list on, so the operator sends it once.

The leader puts the whole generation into the store that it hosts, as soon as it has it. A worker that has the notice
reads it there. A notice and a list belong together by job, generation and nonce; the notice comes from the operator.
"""

import datetime
import socket
import time
import zlib
from collections.abc import Callable

import torch.distributed as dist

from pipetransformer.elastic.transport.connections import Connections
from pipetransformer.elastic.transport.groups import PrefixStore, Store, TCPStore
from pipetransformer_contract.messages import Generation, GenerationNotice

_KEY = "members"
_CONNECT_TIMEOUT = datetime.timedelta(seconds=0.5)
_RETRY_SECONDS = 0.02
#: One wait in the leader's store; in between a worker looks whether it still wants the list.
_WAIT = datetime.timedelta(seconds=1)


def place_of(generation: Generation | GenerationNotice, store: Store) -> Store:
    """The part of the leader's store in which this generation meets, and no other, of this job or another."""
    return PrefixStore(f"{generation.job_uid}/{generation.layout_generation}/{generation.nonce}", store)


def hand_on(generation: Generation, worker: str, own_store: Store) -> None:
    """Put the list into this worker's own store, if it leads the generation."""
    if generation.leader == worker:
        content = generation.model_dump_json(by_alias=True).encode()
        place_of(generation, own_store).set(_KEY, zlib.compress(content))  # type: ignore[arg-type] # it takes bytes, too


def forget(place: Store) -> None:
    """Drop the list once all have met: the store lives as long as its worker."""
    place.delete_key(_KEY)


def take_over(notice: GenerationNotice, seconds: float, unwanted: Callable[[], bool]) -> Generation | None:
    """The generation, as its leader hands it on; None where the leader is silent or says something else.

    Args:
        notice: of the generation.
        seconds: how long the leader may be silent.
        unwanted: ends the wait, such as when a newer generation is published.
    """
    deadline = time.monotonic() + seconds
    place: Store | None = None
    while (left := deadline - time.monotonic()) > 0 and not unwanted():
        try:
            place = place or place_of(notice, _client(notice.leader.address, left))
            place.wait([_KEY], min(_WAIT, datetime.timedelta(seconds=left)))
            generation = Generation.model_validate_json(zlib.decompress(place.get(_KEY)))
        except (dist.DistNetworkError, OSError):
            place = None
            time.sleep(_RETRY_SECONDS)
        except dist.DistStoreError:
            continue  # it has not handed the list on yet
        except (ValueError, zlib.error):
            return None
        else:
            return generation if notice.announces(generation) else None
    return None


def _client(address: str, seconds: float) -> TCPStore:
    return Connections().connect(lambda: connect(address, _CONNECT_TIMEOUT), lambda _: None, seconds)


def connect(address: str, timeout: datetime.timedelta) -> TCPStore:
    """A client of the store at `address` (host:port). To be called in a thread that may be left behind: a client that
    cannot connect tries on by itself, for seconds, and cannot be told to stop.

    Raises:
        dist.DistNetworkError, OSError: no store listens there.
    """
    host, port = split_address(address)
    # So the client gets little time, and is only made once somebody listens.
    socket.create_connection((host, port), timeout.total_seconds()).close()
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host may stand in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
