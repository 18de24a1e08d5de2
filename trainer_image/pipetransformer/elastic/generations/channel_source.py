"""Gives a worker its generations: the notice comes from the operator by long-poll, the list of members from the leader.

The leader asks the operator for the list and passes it on. Any other worker asks only if its leader is silent.
"""

import logging
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.elastic.rendezvous import RendezvousClosedError

from pipetransformer.elastic.transport.groups import Store
from pipetransformer_contract.messages import Generation, GenerationNotice

from .member_list import hand_on, take_over
from .operator_channel import Backoff, Channel, ChannelUnavailableError, JobEndedError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Generation | GenerationNotice)

POLL_SECONDS = 20
#: How long a leader may be silent before a worker asks the operator for the list of members. Each worker waits between
#: one and two times as long, so that they do not all ask at once.
LEADER_SECONDS = 5.0


class ChannelSource:
    """Generations by long-poll (`GenerationSource`). Says `ready` before each poll, because an operator that has
    restarted does not know it.

    Args:
        channel: this worker's channel to the operator.
        address: address of the store that this worker hosts.
        own_store: that store; the worker passes the list on in it when it leads.
    """

    def __init__(self, channel: Channel, address: str, own_store: Store) -> None:
        self._channel = channel
        self._address = address
        self._own_store = own_store
        self._stop = threading.Event()
        self._newest = 0

    def next_generation(self, after: int) -> Generation:
        while True:
            found: Generation | GenerationNotice = self._ask(after, self._poll)
            if isinstance(found, Generation):
                return found
            if (handed := self._handed_on(found)) is not None:
                return handed
            if self._newest <= found.layout_generation:
                logger.info("leader %s is silent: asking the operator for the members", found.leader.name)
                return self._ask(after, self._poll_whole)

    def watched(self) -> "WatchedChannel":
        """Return the same generations for the present leader. It asks the operator for the whole list at once, because
        the next leader may be one of its followers, and learns of the generation from it."""
        return WatchedChannel(self)

    def watch(self, after: int) -> Generation:
        """Do as `next_generation`, for the present leader."""
        return self._ask(after, self._poll_whole)

    def _ask(self, after: int, poll: Callable[[Channel, int], Answer | None]) -> Answer:
        backoff = Backoff(self._stop)
        with self._channel.kept() as channel:
            while not self._stop.is_set():
                try:
                    channel.ready(self._address)
                    found = poll(channel, after)
                    backoff.reset()
                except JobEndedError as error:
                    raise RendezvousClosedError(str(error)) from error
                except ChannelUnavailableError as error:
                    logger.info("channel: %s; trying again", error)
                    backoff.wait(error.retry_after)
                    continue
                if found is not None and found.layout_generation > after:
                    self.saw(found.layout_generation)
                    return found
        raise RendezvousClosedError("this worker is closing")

    def _poll(self, channel: Channel, after: int) -> Generation | GenerationNotice | None:
        notice = channel.notice(after, POLL_SECONDS)
        if notice is not None and notice.leader.name == channel.worker:
            return self._poll_whole(channel, after)
        return notice

    def _poll_whole(self, channel: Channel, after: int) -> Generation | None:
        generation = channel.generation(after, POLL_SECONDS)
        if generation is not None:
            hand_on(generation, channel.worker, self._own_store)
        return generation

    def _handed_on(self, notice: GenerationNotice) -> Generation | None:
        """Return the generation from its leader; None if the leader is silent, or a newer generation is published."""
        patience = LEADER_SECONDS * random.uniform(1, 2)
        return take_over(notice, patience, lambda: self._stop.is_set() or self._newest > notice.layout_generation)

    def newest(self) -> int:
        return self._newest

    def saw(self, layout_generation: int) -> None:
        """Note that a generation is published. Heartbeats and reports call this with what the operator answers."""
        self._newest = max(self._newest, layout_generation)

    def close(self) -> None:
        self._stop.set()


class WatchedChannel:
    """See `ChannelSource.watched`."""

    def __init__(self, source: ChannelSource) -> None:
        self._source = source

    def next_generation(self, after: int) -> Generation:
        return self._source.watch(after)

    def newest(self) -> int:
        return self._source.newest()

    def close(self) -> None:
        self._source.close()
