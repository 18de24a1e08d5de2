"""Signals tell a worker whether to stop or to write a checkpoint. By hooks it tells its process how far it is.

Tests override hooks to kill a worker at a chosen point.
"""

from enum import StrEnum


class HookPoint(StrEnum):
    """A named point in a worker's life. `Hooks.on_point` also gets a number: at points of a round the step (from 0), at
    points of a regroup the generation that the workers move to."""

    COMPUTED = "Computed"  #: gradients are computed, not yet reduced
    REDUCED = "Reduced"  #: gradients are reduced; no worker has voted
    VOTED = "Voted"  #: all workers have voted; this worker has not committed
    STEPPED = "Stepped"  #: the optimizer has stepped; the ledger does not have the step yet
    COMMITTED = "Committed"  #: the step is committed; freeze, evaluation and checkpoint are still to do
    ENDED = "Ended"  #: the round is done, with its freeze decision, evaluation and checkpoint
    FOUND = "Found"  #: this worker knows the next generation; it has not joined the rendezvous
    MET = "Met"  #: all members have joined the rendezvous; the process groups are not made yet
    MOVING = "Moving"  #: state is being sent and received, or is about to be built or read
    ASSEMBLED = "Assembled"  #: this worker has the state of its new role; it has not voted for the generation
    AGREED = "Agreed"  #: all members have voted for the generation; this worker still has its old state


class WorkerSignals:
    """What a worker asks its process. A process overrides what it needs; by default nothing stops the worker."""

    def stop_requested(self) -> bool:
        """Whether the process was told to stop. The worker then leaves at the end of the round."""
        return False

    def checkpoint_request(self) -> str:
        """Token of the checkpoint that a user asks for now; empty without one."""
        return ""

    def ends_soon(self) -> bool:
        """Whether a worker that was told to stop exits when its group breaks. Otherwise it waits for a next generation,
        which may still need its state."""
        return True

    def out_of_time(self) -> bool:
        """Whether a worker that stops drops its last checkpoint if the storage fails. Otherwise it retries."""
        return True


class Hooks(WorkerSignals):
    """What a worker calls in its process: the signals, and what the worker tells."""

    def on_point(self, point: HookPoint, number: int) -> None:
        """Called when the worker reaches `point`. `HookPoint` says what `number` is."""

    def on_broken(self) -> None:
        """Called when the generation broke. `Trainer.lost_peers` has the workers that this one no longer reaches."""
