"""Methods that a worker calls to tell its process what happens, and to ask whether to stop.

Tests use the same hooks to end a worker at a chosen point.
"""

from enum import StrEnum


class HookPoint(StrEnum):
    """A point in the worker's code where it calls `Hooks.on_point`."""

    COMPUTED = "Computed"  #: gradients are computed, not yet reduced
    REDUCED = "Reduced"  #: gradients are reduced; no worker has voted
    VOTED = "Voted"  #: all workers have voted; this worker has not committed
    STEPPED = "Stepped"  #: the optimizer has stepped; the ledger does not say so yet
    COMMITTED = "Committed"  #: the step is committed; freeze, evaluation and checkpoint are still to do
    ENDED = "Ended"  #: the round is done, also freeze, evaluation and checkpoint
    FOUND = "Found"  #: this worker knows the next generation, and has not joined its rendezvous
    MET = "Met"  #: all members have joined the rendezvous; the process groups are not made
    MOVING = "Moving"  #: state is being sent and received, or is about to be built or read
    ASSEMBLED = "Assembled"  #: this worker has the state of its new role; it has not voted for the generation
    AGREED = "Agreed"  #: all have voted for the generation; the old state is not dropped yet


class Hooks:
    """Base class: a process overrides the methods that it needs. By default nothing stops the worker."""

    def on_point(self, point: HookPoint, number: int) -> None:
        """Called when the worker reaches a point.

        Args:
            point: the point.
            number: at a point of a round, the step (from 0); at a point of a regroup, the next layout generation.
        """

    def on_broken(self) -> None:
        """Called when the generation broke. `Trainer.lost_peers` names the workers that may be lost."""

    def stop_requested(self) -> bool:
        """Whether this worker must leave at the end of the round."""
        return False

    def ends_soon(self) -> bool:
        """Whether this worker, once told to stop, exits when its group breaks, because no generation will name it.

        Otherwise it waits for another generation, and writes a checkpoint with its members.
        """
        return True

    def out_of_time(self) -> bool:
        """Whether this worker's time is over, so that it no longer retries to write the last checkpoint."""
        return True
