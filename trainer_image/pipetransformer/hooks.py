"""What a worker tells and asks its process. Tests use the same hooks to end a worker at a chosen point."""

from enum import StrEnum


class HookPoint(StrEnum):
    """A named point in a worker's life. Points of a round come with the step (from 0), points of a regroup with the
    layout generation that it leads to."""

    COMPUTED = "Computed"  #: gradients are computed, not yet reduced
    REDUCED = "Reduced"  #: gradients are reduced; no worker has voted
    VOTED = "Voted"  #: all workers have voted; this worker has not committed
    STEPPED = "Stepped"  #: the optimizer has stepped; the ledger does not say so yet
    COMMITTED = "Committed"  #: the step is committed; freeze, evaluation and checkpoint are still to do
    ENDED = "Ended"  #: the round and all that follows it is done
    FOUND = "Found"  #: this worker knows the next generation, and has not joined its rendezvous
    MET = "Met"  #: all members have joined the rendezvous; the groups are not made
    MOVING = "Moving"  #: state is being sent and received, or is about to be built or read
    ASSEMBLED = "Assembled"  #: this worker has the state of its new role; it has not voted for the generation
    AGREED = "Agreed"  #: all have voted for the generation; nothing old is dropped


class Hooks:
    """A process overrides the methods that it needs. By default nothing stops the worker."""

    def on_point(self, point: HookPoint, number: int) -> None:
        """The worker has reached a point."""

    def on_broken(self) -> None:
        """The generation broke. `Trainer.lost_peers` names the workers that this one no longer reaches."""

    def stop_requested(self) -> bool:
        """Whether this worker shall leave at the end of the round."""
        return False

    def ends_soon(self) -> bool:
        """Whether a worker that shall leave does so when its group breaks, because no generation will name it."""
        return True

    def out_of_time(self) -> bool:
        """Whether to give up the last checkpoint when the storage does not take it."""
        return True
