"""Makes a worker's state for its new role without other workers: from the seed, or from a checkpoint.

A thread does this while the workers vote (`Barrier`), because it may take long. The thread may still read after the
connections break, so it refers to no group.
"""

import threading
from dataclasses import dataclass

import torch

from pipetransformer.errors import DeviceMemoryError, SpecError, fault_of
from pipetransformer.state.worker_state import WorkerState

from .assemble import StateSources, copies_of, off_device, put_unit, units_of
from .transfer_plan import Origin, TransferPlan


@dataclass(frozen=True, slots=True)
class AssemblyWithoutPeers:
    """Makes the state of one worker's new role, if it comes from the seed or from a checkpoint. Otherwise `Assembly`
    does.

    Attributes:
        sources: where units come from.
        plan: the leader's plan, of origin `FRESH` or `CHECKPOINT`.
        rank: this worker's rank among the participants.
        device: where training runs.
        failed: set when the regroup has failed.
    """

    sources: StateSources
    plan: TransferPlan
    rank: int
    device: torch.device
    failed: threading.Event

    def assemble(self) -> WorkerState:
        """Return the state of the new role; it is empty for a leaver.

        Raises:
            SpecError: the model cannot be built, or the checkpoint belongs to another model.
            DeviceMemoryError: the accelerator has too little memory. No other state is there to continue with.
            StorageError, LookupError: a unit cannot be read from the checkpoint.
            ConnectionAbortedError: the regroup failed meanwhile.
        """
        try:
            return self._assemble()
        except RuntimeError as error:
            if isinstance(fault := fault_of(error), DeviceMemoryError):
                raise fault from fault.__cause__
            raise

    def _assemble(self) -> WorkerState:
        # Make the units from the seed, or read them from the checkpoint.
        new = WorkerState(self.sources.codec.num_layers, self.sources.codec.ties)
        wanted, kept_off = units_of(self.plan, self.rank), off_device(self.plan, self.rank)
        if self.plan.origin is Origin.FRESH:
            built = self.sources.job.build_units(wanted)
            new.units = {index: unit.to(self.device) for index, unit in built.items()}
        else:
            new.control = self.sources.checkpoints.load_control(self.plan.checkpoint)
            new.control.kept_step = self.plan.kept_step
            new.control.note_cached(self.plan.cached_layers)
            for index in wanted:
                if self.failed.is_set():
                    raise ConnectionAbortedError("the regroup failed before all units were read")
                off = index in kept_off
                read = self.sources.checkpoints.load_unit(index)
                tensors = read if off else {name: tensor.to(self.device) for name, tensor in read.items()}
                try:
                    put_unit(self.sources, new, index, tensors, self.device, off=off)
                except ValueError as error:
                    message = f"{self.plan.checkpoint} belongs to another model: {error}"
                    raise SpecError("spec.checkpoint.location", message) from error
        # Add what no checkpoint contains, and freeze units.
        new.control.costs = self.plan.costs
        new.control.round_ended_at = max(new.control.round_ended_at, self.plan.round_ended_at)
        new.set_apart(copies_of(self.plan, self.rank))
        new.apply_boundary()
        return new
