"""Under a torchrun agent that holds the rendezvous, each worker process lives for one generation.

The agent's handler puts the generation into the environment of the process that the agent starts. When a newer one is
published, the agent stops that process and starts another, which resumes from the last checkpoint.
"""

import datetime
import os
import threading

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from pipetransformer.elastic.generations.rendezvous import GenerationRendezvousHandler, GenerationSource
from pipetransformer.elastic.generations.watcher import GenerationWatcher
from pipetransformer.elastic.transport.groups import TCPStore
from pipetransformer.elastic.transport.watchdog import Watchdog
from pipetransformer_contract.messages import Generation

#: JSON of the generation that the agent has met.
GENERATION = "PIPETRANSFORMER_AGENT_GENERATION"


class AgentRendezvousHandler(GenerationRendezvousHandler):
    """The agent's side. It watches for newer generations itself, because its process has no trainer.

    Implements `Limit`: a newer generation ends the wait for participants of the present one.
    """

    def __init__(
        self, worker: str, own_store: TCPStore, source: GenerationSource, *, timeout: datetime.timedelta
    ) -> None:
        super().__init__(worker, own_store, source, timeout=timeout)
        self._watcher = GenerationWatcher(source.next_generation)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the participants of the next generation, or of a newer one that is published meanwhile."""
        watchdog = Watchdog()
        watchdog.start()
        try:
            while (info := self._meet(watchdog)) is None:
                pass
        finally:
            watchdog.stop()
        assert self.generation is not None
        os.environ[GENERATION] = self.generation.model_dump_json(by_alias=True)
        return info

    def _meet(self, watchdog: Watchdog) -> RendezvousInfo | None:
        """Meet the participants of the next generation. Returns None if a newer one is published meanwhile."""
        self.find_next()
        self._watcher.watch(self.current)
        try:
            with watchdog.watching(self.connections, self):
                info = super().next_rendezvous()
        except (RendezvousConnectionError, RendezvousTimeoutError):
            if not self.is_superseded():
                raise
            return None
        return None if self.connections.is_shut else info

    def is_superseded(self) -> bool:
        return self._watcher.found(self.current) is not None

    def why_past(self) -> str:
        return "a newer generation is published" if self.is_superseded() else ""


class OneGeneration:
    """Gives the agent's generation (`GenerationSource`). The next one goes to another process."""

    def __init__(self, generation: Generation) -> None:
        # A nonce of their own, because the agents have used this one's keys in the same store. Agents that leave start
        # no process.
        self._generation = generation.model_copy(update={"nonce": f"{generation.nonce}-processes", "leavers": []})
        self._stopped = threading.Event()

    @classmethod
    def from_environment(cls) -> "OneGeneration | None":
        """Read the generation. Returns None if no such agent started this process."""
        content = os.environ.get(GENERATION)
        return None if content is None else cls(Generation.model_validate_json(content))

    def next_generation(self, after: int) -> Generation:
        if after < self._generation.layout_generation:
            return self._generation
        self._stopped.wait()
        raise RendezvousClosedError("the agent starts the next generation in a new process")

    def newest(self) -> int:
        return self._generation.layout_generation

    def close(self) -> None:
        self._stopped.set()
