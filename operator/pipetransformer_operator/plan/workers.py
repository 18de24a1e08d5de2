"""A tuple of workers with filters and lookups that rules need."""

from collections.abc import Callable, Container

from .types import Worker, WorkerPhase


class Workers(tuple[Worker, ...]):
    """Some workers of one job. Filters keep the order, and return another `Workers`."""

    __slots__ = ()

    # -- what they are called

    @property
    def ids(self) -> frozenset[int]:
        """Ids of these workers."""
        return frozenset(worker.id for worker in self)

    @property
    def names(self) -> frozenset[str]:
        """Names of these workers."""
        return frozenset(worker.name for worker in self)

    @property
    def nodes(self) -> list[str]:
        """The node of each worker, in order; empty text for a worker without a node."""
        return [worker.node for worker in self]

    @property
    def by_id(self) -> dict[int, Worker]:
        """These workers by their ids."""
        return {worker.id: worker for worker in self}

    def highest_priority(self, otherwise: int) -> int:
        """The highest priority of these workers' pods; `otherwise` if there are no workers."""
        return max((worker.priority for worker in self), default=otherwise)

    # -- some of them

    def that(self, holds: Callable[[Worker], bool]) -> "Workers":
        """The workers for which `holds` returns true."""
        return Workers(filter(holds, self))

    def among(self, ids: Container[int]) -> "Workers":
        """The workers whose ids are in `ids`."""
        return self.that(lambda worker: worker.id in ids)

    def without(self, ids: Container[int]) -> "Workers":
        """The workers whose ids are not in `ids`."""
        return self.that(lambda worker: worker.id not in ids)

    @property
    def alive(self) -> "Workers":
        """The workers that can train, now or later."""
        return self.that(lambda worker: worker.alive)

    @property
    def ended(self) -> "Workers":
        """The workers that can no longer train."""
        return self.that(lambda worker: not worker.alive)

    @property
    def running(self) -> "Workers":
        """The workers whose pods run."""
        return self.that(lambda worker: worker.phase is WorkerPhase.RUNNING)

    @property
    def placed(self) -> "Workers":
        """The workers that have a node."""
        return self.that(lambda worker: worker.scheduled)

    @property
    def unplaced(self) -> "Workers":
        """The workers that have no node."""
        return self.that(lambda worker: not worker.scheduled)

    @property
    def draining(self) -> "Workers":
        """The workers on nodes that accept no new pods, or are unhealthy."""
        return self.that(lambda worker: worker.draining)

    @property
    def moving(self) -> "Workers":
        """The workers that can train, but must leave their nodes."""
        return self.alive.draining

    @property
    def staying(self) -> "Workers":
        """The workers that can train, and may stay on their nodes."""
        return self.alive.that(lambda worker: not worker.draining)

    @property
    def holding(self) -> "Workers":
        """The workers whose pods still have an accelerator."""
        return self.that(lambda worker: worker.holds)
