"""Two ranks with watchdogs."""

import datetime
import threading

import pytest

from pipetransformer.elastic.transport.connections import Connections
from pipetransformer.elastic.transport.groups import GenerationGroups, TCPStore, Transport, ensure_default_group
from pipetransformer.elastic.transport.watchdog import Deadline
from tests.testkit.trainer.storing import until

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


class Clock:
    """The watchdogs' clock, which stands still until a test lets time pass. A busy machine is late for no deadline.

    Args:
        limit: seconds by which the deadline is put off that the test watches.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
        self._now, self._times = 0.0, 0
        put_off = Deadline.put_off

        def count(deadline: Deadline, seconds: float) -> None:
            put_off(deadline, seconds)
            self._times += seconds == limit

        monkeypatch.setattr("pipetransformer.elastic.transport.watchdog.time", self)
        monkeypatch.setattr(Deadline, "put_off", count)

    def monotonic(self) -> float:
        """Stands in for `time.monotonic`."""
        return self._now

    def go_on(self, seconds: float) -> None:
        """Let time pass once the deadline has been put off again."""
        before = self._times
        until(lambda: self._times > before)
        self._now += seconds
