"""Where a worker's generations come from: notices by long-poll from the operator, the list of members from the leader.

Who leads asks the operator for the list and hands it on; any other worker does so only when its leader is silent.
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
#: How long a leader may be silent before a worker asks the operator for the list of members; up to twice as long, so
#: that not all ask at once.
LEADER_SECONDS = 5.0


class ChannelSource:
    """Generations by long-poll (`GenerationSource`): the notice from the operator, the list of members from the leader.

    Says `ready` before each poll, because a restarted operator has forgotten it.

    Args:
        channel: of this worker.
        address: of the store that this worker hosts.
        own_store: that store, in which it hands the list on when it leads.
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
                logger.info("leader %s is silent: the operator is asked for the members", found.leader.name)
                return self._ask(after, self._poll_whole)

    def watched(self) -> "WatchedChannel":
        """The same generations for the present leader. It asks the operator for the whole list at once, because the
        next leader may still be one of its followers, and learn of the generation from it."""
        return WatchedChannel(self)

    def watch(self, after: int) -> Generation:
        """As `next_generation`, for the present leader."""
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
        """What the leader of the generation hands on, unless it is silent or another generation is published."""
        patience = LEADER_SECONDS * random.uniform(1, 2)
        return take_over(notice, patience, lambda: self._stop.is_set() or self._newest > notice.layout_generation)

    def newest(self) -> int:
        return self._newest

    def saw(self, layout_generation: int) -> None:
        """Note that a generation is published, as heartbeats and reports learn."""
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
