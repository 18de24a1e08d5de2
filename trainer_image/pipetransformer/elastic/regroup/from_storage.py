"""A worker's state in its new role where no peer is needed for it: from the seed, or from a checkpoint.

Nobody knows how long that takes, so a thread does it while the workers of the regroup vote (`Barrier`). It refers to
nothing of theirs: when their connections break, it may still be reading.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pipetransformer.errors import SpecError
from pipetransformer.state.worker_state import WorkerState

from .assemble import StateSources, put_unit
from .transfer_plan import Origin, TransferPlan


@dataclass(frozen=True, slots=True)
class Alone:
    """One worker's part.

    Attributes:
        new: its state, which holds nothing yet.
        plan: of origin `FRESH` or `CHECKPOINT`.
        wanted: units of its role.
        device: of training.
        given_up: whether nobody wants it any more.
    """

    sources: StateSources
    new: WorkerState
    plan: TransferPlan
    wanted: range
    device: torch.device
    given_up: Callable[[], bool]

    def make(self) -> WorkerState:
        """The state of the new role, empty for a leaver.

        Raises:
            SpecError: the model cannot be built, or the checkpoint is of another one.
            StorageError, LookupError: a unit cannot be read from the checkpoint.
            ConnectionAbortedError: it was given up.
        """
        if self.plan.origin is Origin.FRESH:
            built = self.sources.build_units(self.wanted)
            self.new.units = {index: unit.to(self.device) for index, unit in built.items()}
        else:
            self.new.control = self.sources.load_control(self.plan.checkpoint)
            self.new.control.kept_step = self.plan.kept_step
            for index in self.wanted:
                if self.given_up():
                    raise ConnectionAbortedError("given up before all units were read")
                read = self.sources.load_unit(index)
                tensors = {name: tensor.to(self.device) for name, tensor in read.items()}
                try:
                    put_unit(self.sources, self.new, index, tensors, self.device)
                except ValueError as error:
                    message = f"{self.plan.checkpoint} is of another model: {error}"
                    raise SpecError("spec.checkpoint.location", message) from error
        self.new.apply_boundary()
        return self.new
