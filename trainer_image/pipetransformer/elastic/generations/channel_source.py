"""Gets a worker's generations from the operator by long-poll.

The operator sends a short notice to each worker, and the list of members to the leader. The other workers read the list
from the leader's store. If the leader is silent, they ask the operator.
"""

import logging
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.elastic.rendezvous import RendezvousClosedError

from pipetransformer.elastic.transport.groups import Store
from pipetransformer_contract.messages import Generation, GenerationNotice

from .channel_client import Backoff, ChannelClient, ChannelUnavailableError, JobEndedError
from .member_list import read_shared, share_if_leader

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Generation | GenerationNotice)

#: Longest time that the operator may keep a poll open.
POLL_SECONDS = 20
#: A worker waits for the leader's list one to two times as long, at random, before it asks the operator. Otherwise all
#: workers would ask at once.
LEADER_SECONDS = 5.0


class ChannelSource:
    """Gets generations from the operator by long-poll. Implements `GenerationSource`.

    Sends `ready` before each poll, because an operator that has restarted does not know that this worker is ready.

    Args:
        channel: this worker's channel to the operator.
        address: host:port of the store that this worker hosts.
        own_store: that store. As the leader, this worker puts the list of members into it.
    """

    def __init__(self, channel: ChannelClient, address: str, own_store: Store) -> None:
        self._channel = channel
        self._address = address
        self._own_store = own_store
        self._stop = threading.Event()
        #: Number of the newest generation known to be published, 0 for none.
        self._newest = 0

    def next_generation(self, after: int) -> Generation:
        while True:
            found: Generation | GenerationNotice = self._ask(after, self._poll)
            if isinstance(found, Generation):
                return found
            if (shared := self._read_shared(found)) is not None:
                return shared
            if self._newest <= found.layout_generation:
                logger.info("no list of members from leader %s: asking the operator for it", found.leader.name)
                return self._ask(after, self._poll_whole)

    def watch(self, after: int) -> Generation:
        """Like `next_generation`, but ask the operator for the list of members at once. The present leader's
        `GenerationWatcher` calls this. The next leader may be another worker, which learns of the generation from it.
        """
        return self._ask(after, self._poll_whole)

    def _ask(self, after: int, poll: Callable[[ChannelClient, int], Answer | None]) -> Answer:
        """Poll until the operator answers with a generation above `after`, or with its notice.

        Raises:
            RendezvousClosedError: the job has ended, or `close` was called.
        """
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
                    logger.info("no generation from the operator: %s; trying again", error)
                    backoff.wait(error.retry_after)
                    continue
                if found is not None and found.layout_generation > after:
                    self.on_published(found.layout_generation)
                    return found
        raise RendezvousClosedError("this worker no longer waits for a generation")

    def _poll(self, channel: ChannelClient, after: int) -> Generation | GenerationNotice | None:
        notice = channel.notice(after, POLL_SECONDS)
        if notice is not None and notice.leader.name == channel.worker:
            return self._poll_whole(channel, after)
        return notice

    def _poll_whole(self, channel: ChannelClient, after: int) -> Generation | None:
        generation = channel.generation(after, POLL_SECONDS)
        if generation is not None:
            share_if_leader(generation, channel.worker, self._own_store)
        return generation

    def _read_shared(self, notice: GenerationNotice) -> Generation | None:
        """Return the generation from its leader's store. None if the leader is silent or has another generation, if a
        newer one is published, or after `close`."""
        patience = LEADER_SECONDS * random.uniform(1, 2)
        return read_shared(notice, patience, lambda: self._stop.is_set() or self._newest > notice.layout_generation)

    def newest(self) -> int:
        return self._newest

    def on_published(self, layout_generation: int) -> None:
        """Note that this generation is published. Called with each answer to a heartbeat or a report."""
        self._newest = max(self._newest, layout_generation)

    def close(self) -> None:
        self._stop.set()
