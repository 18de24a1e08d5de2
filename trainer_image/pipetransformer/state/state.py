"""The committed state of a worker, and its form on the wire.

One list of what is committed serves regroup, checkpoint and the final model: parameters and buffers of the units held,
their optimizer moments, and the control state that is the same on all workers. What of a unit travels follows from the
unit, the optimizer and the boundary alone, so a receiver knows all shapes before anything is sent.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipetransformer.errors import SpecError
from pipetransformer.freeze.boundary import apply_boundary, trains
from pipetransformer.models import Ties, unit_name
from pipetransformer_contract.spec import Evaluation, Goal, Optimizer

from .optimizer import Moments, moment_shapes
from .packed_parameters import STEP_COUNT

_ALIGNMENT = 16
#: Bytes from which on a tensor travels by itself.
_LARGE = 1 << 16


@dataclass
class Control:
    """What every worker knows alike between rounds.

    Attributes:
        step: global steps committed so far.
        last_generation: lasting layout generation that committed the last of them, 0 before the first.
        boundary: frozen blocks.
        boundary_step: step before which the boundary was last changed.
        fell_step: step before which it last fell, 0 for never: what was frozen then and is now has not changed since.
        policy: state of the freeze policy.
        metrics: values of the newest evaluation, by name.
        best: those of the best one, empty before the first.
        best_step: steps that were committed at the best one.
        kept_step: steps that were committed at the one whose model is kept, 0 for none.
        evaluations_since_best: how many in a row were not better.
        round_ended_at: wall clock at the end of the last round, 0 before the first: a pause is counted from it.
        costs: what the units cost, `ModelCosts` by field name; None before it was measured.
        skipped_steps: steps in a row, up to now, that were not finite.
        last_vote: the vote that committed the last step; lets a worker that missed it commit the same.
        last_similarities: those that came with that vote.
        decided_step: steps that were committed when the freeze policy was last asked.
        last_step: the last step's line in the run's record, in case that the leader died before it was written.
        evaluated_step: steps that were committed at the newest evaluation.
        job_uid: of the job that trains.
        earlier_job: of the one whose checkpoint it went on from, its own where it began from the start; empty where
            nobody knows.
        earlier_generations: the highest layout generation of earlier jobs when this one began.
    """

    step: int = 0
    last_generation: int = 0
    boundary: int = 0
    boundary_step: int = 0
    fell_step: int = 0
    policy: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    best_step: int = 0
    kept_step: int = 0
    evaluations_since_best: int = 0
    round_ended_at: float = 0.0
    costs: dict[str, Any] | None = None
    skipped_steps: int = 0
    last_vote: list[float] = field(default_factory=list)
    last_similarities: list[float] = field(default_factory=list)
    decided_step: int = -1
    last_step: dict[str, Any] = field(default_factory=dict)
    evaluated_step: int = 0
    job_uid: str = ""
    earlier_job: str = ""
    earlier_generations: int = 0

    def begin_job(self, uid: str, earlier_generations: int) -> None:
        """A generation of the job `uid` goes on from here; another job may have come so far."""
        if self.job_uid != uid:
            self.earlier_job = self.job_uid or (uid if self.step == 0 else "")
            self.job_uid, self.earlier_generations = uid, earlier_generations

    def lasting_generation(self, number: int) -> int:
        """The layout generation `number` of this job, in what outlives it: above those of earlier jobs."""
        return self.earlier_generations + number

    @property
    def point(self) -> tuple[int, int]:
        """Which committed state this is. Two generations that do the same step sum gradients in another order, so
        their states differ in the last bits."""
        return self.step, self.last_generation

    @property
    def best_is_kept(self) -> bool:
        """Whether the model of the best evaluation is kept."""
        return 0 < self.best_step == self.kept_step

    def is_better(self, values: dict[str, float], spec: Evaluation) -> bool:
        """Whether what an evaluation gave is the best so far; where the best model is to be kept, of what is kept."""
        value, best = values[spec.best_metric], self.best.get(spec.best_metric)
        if spec.keep_best and not self.best_is_kept:
            best = None
        return math.isfinite(value) and (best is None or (value > best if spec.goal is Goal.HIGHEST else value < best))

    def note_evaluation(self, values: dict[str, float], *, better: bool) -> None:
        """Keep what an evaluation after `step` steps gave."""
        self.metrics, self.evaluated_step = values, self.step
        self.evaluations_since_best = 0 if better else self.evaluations_since_best + 1
        if better:
            self.best, self.best_step = values, self.step

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Control":
        """From what `to_dict` gave, here or elsewhere: a newer trainer may have written more than this one knows."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})


@dataclass
class WorkerState:
    """Units that this worker holds, by index, with the moments of their parameters by whole-model name."""

    num_layers: int
    ties: Ties = field(default_factory=Ties)
    control: Control = field(default_factory=Control)
    units: dict[int, nn.Module] = field(default_factory=dict)
    moments: Moments = field(default_factory=dict)

    def named_parameters(self, index: int) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of a unit under their whole-model names."""
        prefix = unit_name(index, self.num_layers)
        for name, parameter in self.units[index].named_parameters():
            yield f"{prefix}.{name}", parameter

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of all units held that still train."""
        for index in sorted(self.units):
            prefix = unit_name(index, self.num_layers)
            for name, parameter in self.units[index].named_parameters():
                if trains(index, name, self.control.boundary, self.ties):
                    yield f"{prefix}.{name}", parameter

    def apply_boundary(self) -> None:
        """Freeze and unfreeze the units held, by the boundary. A parameter that freezes loses its moments."""
        apply_boundary(self.units, self.control.boundary, self.ties)
        for index in self.units:
            for name, parameter in self.named_parameters(index):
                if not parameter.requires_grad:
                    self.moments.pop(name, None)

    def go_on_from(self, control: Control) -> None:
        """Take over what others have decided after the step that this worker has committed, too."""
        self.control = control
        self.apply_boundary()

    def unit_tensors(self, index: int, *, with_moments: bool) -> dict[str, Tensor]:
        """Parameters and buffers, and moments as `NAME@KEY`, of one unit by whole-model name."""
        prefix = unit_name(index, self.num_layers)
        tensors = {f"{prefix}.{name}": tensor for name, tensor in self.units[index].state_dict().items()}
        if with_moments:
            for name, _ in self.named_parameters(index):
                for key, tensor in self.moments.get(name, {}).items():
                    tensors[f"{name}@{key}"] = tensor
        return tensors

    def put_unit(self, index: int, unit: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Hold `unit`, whose parameters and buffers become those that `unit_tensors` gave: nothing is copied.

        Args:
            index: of the unit.
            unit: may be on the meta device.
            tensors: on the device of training, and nobody else's from here on.

        Raises:
            ValueError: a parameter or buffer of the unit is missing, or of another shape.
            SpecError: an older trainer took its real part for a complex one.
        """
        prefix = unit_name(index, self.num_layers)
        for name, wanted in unit.state_dict().items():
            given = tensors.get(f"{prefix}.{name}")
            if given is None:
                raise ValueError(f"state of {prefix} has no {name}")
            if given.shape != wanted.shape:
                raise ValueError(f"{name} of {prefix} is {tuple(given.shape)} and not {tuple(wanted.shape)}")
            if given.is_complex() != wanted.is_complex():
                raise SpecError(
                    "spec.checkpoint.location",
                    f"{prefix}.{name} has lost its imaginary part there, as trainers before dropped it: begin anew",
                )
        parameters: dict[int, nn.Parameter] = {}
        for name, old in list(unit.named_parameters(remove_duplicate=False)):
            new = parameters.setdefault(id(old), nn.Parameter(tensors[f"{prefix}.{name}"], old.requires_grad))
            _set(unit, name, new)
        for name, _ in list(unit.named_buffers(remove_duplicate=False)):
            if f"{prefix}.{name}" in tensors:
                _set(unit, name, tensors[f"{prefix}.{name}"])
        self.units[index] = unit
        for name, _ in self.named_parameters(index):
            entries = {
                key.removeprefix(f"{name}@"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}@")
            }
            self.moments[name] = {key: tensor.cpu() if key == STEP_COUNT else tensor for key, tensor in entries.items()}

    def joined(self, other: "WorkerState | None") -> "WorkerState":
        """This state with the units that only `other` holds, if both are of the same point; nothing is copied."""
        if other is None or not other.units:
            return self
        if not self.units:
            return other
        if other.control.point != self.control.point:
            return self
        return WorkerState(
            self.num_layers, self.ties, self.control, {**other.units, **self.units}, {**other.moments, **self.moments}
        )


def _set(unit: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(unit.get_submodule(owner), attribute, tensor)


class _Slot(NamedTuple):
    """A tensor of a unit, by its name in `WorkerState.unit_tensors`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes, padded so that any type may follow."""
        return -(-self.shape.numel() * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class UnitCodec:
    """Gives a unit as a few tensors to send, and takes it from those that came.

    The first of them packs everything small, for a message costs more than its bytes; what is large travels from where
    it lies and stays where it arrives. Both ends derive the shapes; only the bytes travel. A parameter that still
    trains carries its moments. One that was never stepped has none yet, and travels with zeros, which mean the same to
    every optimizer here.
    """

    optimizer: Optimizer | None  #: whose moments travel; None for none
    num_layers: int
    ties: Ties = field(default_factory=Ties)

    def size(self, index: int, unit: nn.Module, boundary: int) -> int:
        """Bytes on the wire."""
        return sum(slot.size for slot in self._slots(index, unit, boundary))

    def give(self, state: WorkerState, index: int, device: torch.device) -> list[Tensor]:
        """A unit of `state`: views of it where they are large, copies where they are small."""
        small, large = self._split(index, state.units[index], state.control.boundary)
        tensors = state.unit_tensors(index, with_moments=True)
        packed = torch.zeros(sum(slot.size for slot in small), dtype=torch.uint8, device=device)
        for slot, view in _views(small, packed):
            if slot.name in tensors:
                view.copy_(tensors[slot.name].detach())
        given = [
            tensors[slot.name].detach().contiguous()
            if slot.name in tensors
            else torch.zeros(slot.shape, dtype=slot.dtype, device=device)
            for slot in large
        ]
        return [packed, *given]

    def blank(self, index: int, unit: nn.Module, boundary: int, device: torch.device) -> list[Tensor]:
        """Tensors to receive what `give` gives elsewhere. `unit` is for its shapes only."""
        small, large = self._split(index, unit, boundary)
        packed = torch.empty(sum(slot.size for slot in small), dtype=torch.uint8, device=device)
        return [packed, *(torch.empty(slot.shape, dtype=slot.dtype, device=device) for slot in large)]

    def take(self, parts: Sequence[Tensor], index: int, unit: nn.Module, boundary: int) -> dict[str, Tensor]:
        """What `WorkerState.put_unit` takes, from received tensors, which it owns from then on."""
        small, large = self._split(index, unit, boundary)
        tensors = {slot.name: view.clone() for slot, view in _views(small, parts[0])}
        return tensors | {slot.name: part for slot, part in zip(large, parts[1:], strict=True)}

    def _split(self, index: int, unit: nn.Module, boundary: int) -> tuple[list[_Slot], list[_Slot]]:
        slots = list(self._slots(index, unit, boundary))
        return [slot for slot in slots if slot.size < _LARGE], [slot for slot in slots if slot.size >= _LARGE]

    def _slots(self, index: int, unit: nn.Module, boundary: int) -> Iterator[_Slot]:
        prefix = unit_name(index, self.num_layers)
        for name, tensor in unit.state_dict().items():
            yield _Slot(f"{prefix}.{name}", tensor.shape, tensor.dtype)
        for name, parameter in unit.named_parameters():
            if self.optimizer is None or not trains(index, name, boundary, self.ties):
                continue
            for key, (shape, dtype) in moment_shapes(self.optimizer, parameter).items():
                yield _Slot(f"{prefix}.{name}@{key}", shape, dtype)


def _views(slots: Iterable[_Slot], packed: Tensor) -> Iterator[tuple[_Slot, Tensor]]:
    offset = 0
    for slot in slots:
        end = offset + slot.shape.numel() * slot.dtype.itemsize
        yield slot, packed[offset:end].view(slot.dtype).view(slot.shape)
        offset += slot.size
