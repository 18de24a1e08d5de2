"""Several workers of one job, and what rules ask of them together."""

from collections.abc import Callable, Container

from .types import Worker, WorkerPhase


class Workers(tuple[Worker, ...]):
    """Some workers, in the order in which they were given. Each question returns those that it names."""

    __slots__ = ()

    # -- what they are called

    @property
    def ids(self) -> frozenset[int]:
        """Their ids."""
        return frozenset(worker.id for worker in self)

    @property
    def names(self) -> frozenset[str]:
        """Their names."""
        return frozenset(worker.name for worker in self)

    @property
    def nodes(self) -> list[str]:
        """The node of each; empty for one that has none."""
        return [worker.node for worker in self]

    @property
    def by_id(self) -> dict[int, Worker]:
        """Each by its id."""
        return {worker.id: worker for worker in self}

    def highest_priority(self, otherwise: int) -> int:
        """The highest priority of their pods; `otherwise` if there are none."""
        return max((worker.priority for worker in self), default=otherwise)

    # -- some of them

    def that(self, holds: Callable[[Worker], bool]) -> "Workers":
        """Those for which `holds` is true."""
        return Workers(filter(holds, self))

    def among(self, ids: Container[int]) -> "Workers":
        """Those with these ids."""
        return self.that(lambda worker: worker.id in ids)

    def without(self, ids: Container[int]) -> "Workers":
        """Those with other ids."""
        return self.that(lambda worker: worker.id not in ids)

    @property
    def alive(self) -> "Workers":
        """Those that can train, now or later."""
        return self.that(lambda worker: worker.alive)

    @property
    def ended(self) -> "Workers":
        """Those that can train no more."""
        return self.that(lambda worker: not worker.alive)

    @property
    def running(self) -> "Workers":
        """Those whose pods run."""
        return self.that(lambda worker: worker.phase is WorkerPhase.RUNNING)

    @property
    def placed(self) -> "Workers":
        """Those that have a node."""
        return self.that(lambda worker: worker.scheduled)

    @property
    def unplaced(self) -> "Workers":
        """Those that have no node."""
        return self.that(lambda worker: not worker.scheduled)

    @property
    def draining(self) -> "Workers":
        """Those whose nodes accept no new pods, or are unhealthy."""
        return self.that(lambda worker: worker.draining)

    @property
    def moving(self) -> "Workers":
        """Those that can train, and have to leave their nodes."""
        return self.alive.draining

    @property
    def staying(self) -> "Workers":
        """Those that can train, on nodes that they may keep."""
        return self.alive.that(lambda worker: not worker.draining)

    @property
    def holding(self) -> "Workers":
        """Those whose pods still have an accelerator."""
        return self.that(lambda worker: worker.holds)
