"""What the user brings and what fails in it: an error that names it, and no broken connection."""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from pipetransformer import (
    Callback,
    Checkpoint,
    Evaluation,
    Freeze,
    FreezeObservation,
    FreezePolicy,
    Pipeline,
    PipelineModel,
    Training,
)
from pipetransformer.elastic.regroup.agreement import RegroupError
from pipetransformer.errors import (
    BrokenGroupError,
    CallbackError,
    DeviceError,
    DeviceMemoryError,
    ModelError,
    RunningModel,
    SpecError,
    StorageError,
    WorkersDifferError,
    fault_of,
)
from pipetransformer.job.load import load_job
from pipetransformer.schedules import Action, ActionKind, RoundShape
from pipetransformer.training.memory_reserve import Reserve
from pipetransformer.worker.warm_up import warm_up
from pipetransformer_contract.spec import Precision, TrainerSpec
from tests.testkit.trainer.script import NO_FREEZE, events, positives, run, samples

pytestmark = pytest.mark.timeout(120)

BROKEN = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
SHORT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
IN_BFLOAT16 = Training(steps=1, global_batch_size=16, precision=Precision.BFLOAT16)
OUT_OF_BOUNDS = torch.AcceleratorError("CUDA error: device-side assert triggered")


class Broken(Callback):
    def on_step(self, line: Mapping[str, Any]) -> None:
        raise RuntimeError("disk of the callback is full")


class Forgetful(FreezePolicy):
    def decide(self, observation: FreezeObservation) -> int:
        return observation.boundary

    def state_dict(self) -> dict[str, Any]:
        return {"norms": torch.zeros(2)}


class Counting(FreezePolicy):
    """Counts by layer, in a dict whose keys JSON would turn into texts."""

    def decide(self, observation: FreezeObservation) -> int:
        return observation.boundary

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [{3: 1}]}


class Numbers(FreezePolicy):
    """Remembers a number of numpy, but only from its second decision on."""

    def __init__(self) -> None:
        self.stillest: Any = 0

    def decide(self, observation: FreezeObservation) -> int:
        if observation.unit_gradient_norms:
            self.stillest = np.argmin(observation.unit_gradient_norms)
        return observation.boundary

    def state_dict(self) -> dict[str, Any]:
        return {"stillest": self.stillest}


@dataclass(frozen=True)
class Clumsy:
    """A schedule that fails."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        return [[]][shape.workers]


@dataclass(frozen=True)
class Loose:
    """A schedule whose lists have something else than actions."""

    def actions(self, shape: RoundShape) -> Any:
        return [["forward", "backward"]]


@dataclass
class Changing:
    """A schedule that cannot be hashed."""

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        return []


@dataclass(frozen=True)
class Listed:
    """A frozen schedule that cannot be hashed, because it holds a list."""

    numbers: list[int]

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        return []


@dataclass(frozen=True)
class Spanning:
    """A schedule that says who owns its spans."""

    spans: Any

    def owners(self, workers: int) -> tuple[int, ...]:
        return tuple(range(workers)) * int(self.spans)

    def actions(self, shape: RoundShape) -> list[list[Action]]:
        return []


@dataclass(frozen=True)
class Odd:
    """A schedule whose actions are all like this one.

    Attributes:
        action: the action.
    """

    action: Action

    def actions(self, shape: RoundShape) -> Any:
        return [[self.action] for _ in range(shape.workers)]


def broken(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no such class")


def build_nothing() -> PipelineModel:
    raise ValueError("no weights")


class NoCopy(nn.Linear):
    def __deepcopy__(self, memory: object) -> nn.Module:
        raise TypeError("cannot pickle 'generator' object")


def without_parts() -> PipelineModel:
    return PipelineModel.__new__(PipelineModel)


class NoScalar(PipelineModel):
    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return super().loss(output, target, weight)[0], weight.sum(0, keepdim=True)


class EachSample(PipelineModel):
    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> Any:
        return functional.cross_entropy(output, target, reduction="none")


def sure(output: Tensor, target: Tensor, weight: Tensor) -> Any:
    return output.amax(1)


def triple(output: Tensor, target: Tensor, weight: Tensor) -> Any:
    return weight.sum(), weight.sum(), 1


def drawn_anew() -> list[nn.Module]:
    """A model with a weight that each process draws for itself."""
    modules = around(nn.Linear(8, 8))()
    nn.init.constant_(next(modules[1].parameters()), np.random.default_rng().normal())
    return modules


def around(*blocks: nn.Module) -> Callable[[], list[nn.Module]]:
    """A model with these blocks."""
    return lambda: [nn.Linear(4, 8), *blocks, nn.Linear(8, 2)]


class Pair(nn.Linear):
    """Gives two tensors."""

    def __init__(self) -> None:
        super().__init__(4, 8)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Half(nn.Linear):
    """Gives a shorter type."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).half()


class Signs(nn.Linear):
    """Gives no numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) > 0


class NoSamples(nn.Linear):
    """Gives one number, of however many samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


class OwnAttention(nn.MultiheadAttention):
    """Of a class that nothing is known of."""


class OfPositions(nn.Module):
    """Drops what has positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(x.transpose(0, 1))
        return dropped.transpose(0, 1)


class NeedsValues(OfPositions):
    """Cannot run on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.isnan().any() else super().forward(x)


def over_positions(unit: int) -> Callable[[], list[nn.Module]]:
    """A model in which this unit drops what has positions first, and whose micro-batch divides their number."""
    model = [nn.Sequential(nn.Linear(4, 128), nn.Unflatten(1, (16, 8))), nn.Identity(), nn.Identity(), nn.Flatten()]
    model[unit] = nn.Sequential(*([model[0], OfPositions()] if unit == 0 else [OfPositions(), model[unit]]))
    return lambda: [*model]


class Number(PipelineModel):
    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> Any:
        total, of = super().loss(output, target, weight)
        return total.item(), of


class OfSome(PipelineModel):
    """Counts the samples of one class, in micro-batches that may have none."""

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight * (target == 1)
        return super().loss(output, target, weight) if weight.any() else (torch.tensor(0.0), torch.tensor(0.0))


class Detached(PipelineModel):
    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return super().loss(output.detach(), target, weight)


def of_shape(*activation: int) -> Callable[[], PipelineModel]:
    """A model that says that this lies between its blocks, where there are 8 numbers."""
    return lambda: PipelineModel(nn.Linear(4, 8), [nn.Linear(8, 8)], nn.Linear(8, 2), activation)


def dicts(items: int = 1) -> TorchDataset[Any]:
    """Samples as transformers' own trainer takes them, with or without a target beside."""

    class Rows(TorchDataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            row = {"input_ids": torch.zeros(4), "labels": 0}
            return row if items == 1 else (row, 0)

    return Rows()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class TwoTensors(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise RuntimeError("no way back")


class NoWayBack(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Backward.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


class Fails(nn.Linear):
    def __init__(self, error: Exception) -> None:
        super().__init__(8, 8)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


class Averaging(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.get_buffer("mean") + 0.1 * x.detach().mean(0)
        return super().forward(x) - self.mean


class Sparse(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("adjacency", torch.eye(8).to_sparse())


class Masked(nn.Linear):
    """Trains only some of its weights, by a hook."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight.register_hook(lambda gradient: gradient * torch.eye(8))  # type: ignore[no-untyped-call]


class Scaled(PipelineModel):
    """Learns the scale of its loss."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), [nn.Linear(8, 8)], nn.Linear(8, 2), (8,))
        self.criterion = nn.Linear(2, 2)

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return super().loss(self.criterion(output), target, weight)


class Penalised(PipelineModel):
    """Its loss computes with a weight of the model."""

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        loss, total = super().loss(output, target, weight)
        assert isinstance(self.head, nn.Linear)
        return loss + self.head.weight.square().sum(), total


class Unweighted(PipelineModel):
    """Counts samples that only pad a micro-batch."""

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return functional.cross_entropy(output, target, reduction="sum"), weight.sum()


class Contrastive(PipelineModel):
    """Compares samples with each other."""

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return (output @ output.T).logsumexp(1) @ weight, weight.sum()


class Centred(nn.Linear):
    """Subtracts the mean of the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def of_kind(kind: type[PipelineModel]) -> Callable[[], PipelineModel]:
    return lambda: kind(nn.Linear(4, 8), [nn.Linear(8, 8)], nn.Linear(8, 2), (8,))


class Behind(nn.Module):
    """Computes with modules that it does not hold, because a list or a function hides them."""

    def __init__(self, *, in_function: bool) -> None:
        super().__init__()
        hidden = nn.Linear(8, 8)
        self.hidden = (lambda x: hidden(x)) if in_function else [hidden]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.hidden(x) if callable(self.hidden) else self.hidden[0](x)
        return found


class Hidden(nn.Linear):
    """Hides a net that does not train, as one does to keep it out of `parameters()`."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.net = [nn.Linear(8, 8)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.net[0](x)
        shifted: Tensor = super().forward(x) + shift
        return shifted


class Column(nn.Linear):
    """Returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :2]


class Distilled(PipelineModel):
    """Has more modules than its units: a teacher, and the whole model as its author has it."""

    def __init__(self, teach: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__(nn.Linear(4, 8), [Hidden()], Column(8, 4), (8,))
        self.whole = nn.ModuleDict({"body": self.blocks[0], "pooler": nn.Linear(8, 8)})
        self.decoder = self.head
        self.teacher = nn.Linear(2, 2)
        self.teach = teach

    def loss(self, output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.teach(self.teacher, output) @ weight, weight.sum()


def without_gradient(teacher: nn.Module, output: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = teacher(output)
    loss: Tensor = (output - wanted).square().sum(1)
    return loss


@pytest.mark.parametrize(
    "teach",
    [
        without_gradient,
        lambda teacher, output: (output - teacher(output).detach()).square().sum(1),
        lambda teacher, output: teacher.requires_grad_(False)(output).sum(1),
        lambda teacher, output: output.mul_(2).square().sum(1),
    ],
    ids=["no-grad", "detached", "frozen", "in-place"],
)
def test_a_model_may_have_nets_that_do_not_train(teach: Callable[[nn.Module, Tensor], Tensor], tmp_path: Path) -> None:
    result = run(tmp_path, model=lambda: Distilled(teach), training=Training(steps=1, global_batch_size=16))
    assert result.steps == 1


class Unreadable(TorchDataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 37:
            raise OSError("the volume is gone")
        return torch.zeros(4), 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"callbacks": [Broken()]}, CallbackError, "Broken.on_step failed: RuntimeError: disk"),
        ({"metrics": [broken]}, ModelError, "metric broken failed: RuntimeError: no such class"),
        (
            {"model": lambda: PipelineModel(nn.Linear(4, 8), [nn.Linear(8, 8)], nn.Linear(8, 2), cast(Any, 8))},
            SpecError,
            "model: cannot be built: TypeError: activation is 8, not a shape such as",
        ),
        ({"model": around(Masked())}, SpecError, r"blocks\.0\.weight has a hook, which would be lost.* weight \* mask"),
        (
            {"model": Scaled},
            SpecError,
            r"the loss computes with a parameter of shape \(2,.* let the head compute with it",
        ),
        ({"model": of_kind(Penalised)}, ModelError, "loss computes with a parameter of the model, .* in the head"),
        ({"model": of_kind(Unweighted)}, SpecError, "samples of weight 0, which only pad a micro-batch, count"),
        ({"model": of_kind(Contrastive)}, SpecError, "samples together do not give the sum of what each gives alone"),
        ({"model": around(Centred(8, 8))}, SpecError, r"output of blocks\.0 for a sample depends on the other samples"),
        *(
            (
                {"model": around(Behind(in_function=function))},
                SpecError,
                r"blocks\.0 computes with a parameter of shape \(8",
            )
            for function in (False, True)
        ),
        (
            {"model": drawn_anew},
            SpecError,
            r"spec\.model: cannot be built twice: ValueError: blocks\.0\.weight has other values each time",
        ),
        ({"model": of_shape(3, 8)}, ModelError, r"embedding failed: .* \(8,\) in .* activation is \(3, 8\)"),
        ({"data": dicts()}, SpecError, r"data: a sample is a dict, not \(input, target\)"),
        ({"data": (dicts(2), dicts(2))}, SpecError, r"data: a sample's input is a dict, not a tensor or"),
        ({"data": Stream()}, SpecError, r"data: is a Stream: .* map-style"),
        ({"metrics": [positives, positives]}, SpecError, "two metrics are named 'positives'"),
        ({"evaluation": Evaluation(best_metric="f1")}, SpecError, "spec.evaluation.bestMetric: Unknown metric 'f1'"),
        ({"evaluation": Evaluation(keep_best=True)}, SpecError, "spec.evaluation.keepBest"),
        (
            {"data": samples(64, 0), "evaluation": Evaluation(patience=2)},
            SpecError,
            "spec.evaluation.patience: needs held-out samples, but the data have none",
        ),
        ({"model": build_nothing}, SpecError, "model: cannot be built: ValueError: no weights"),
        ({"model": lambda: [nn.Linear(4, 2)]}, SpecError, "a list of at least three modules .* not a list of 1"),
        ({"model": without_parts}, SpecError, "model: cannot be built: AttributeError"),
        ({"model": around(NoCopy(8, 8))}, SpecError, "model: cannot be copied: TypeError: cannot pickle"),
        ({"model": around(nn.Linear(8, 8), nn.Linear(9, 8))}, ModelError, r"forward of blocks\.1 failed: RuntimeError"),
        (
            {"model": around(nn.Linear(8, 8), TwoTensors())},
            ModelError,
            r"blocks\.1 .* returns a tuple, not one tensor: wrap it in a module",
        ),
        (
            {"model": around(nn.Linear(8, 8), TwoTensors()), "training": IN_BFLOAT16},
            ModelError,
            r"blocks\.1 .* returns a tuple, not one tensor: wrap it in a module",
        ),
        (
            {"model": around(Signs(8, 8)), "training": IN_BFLOAT16},
            ModelError,
            r"blocks\.0 .* in torch\.bool for .* all layers must keep the shape and type",
        ),
        (
            {"model": around(torch.jit.script(nn.Linear(8, 8)))},
            SpecError,
            r"spec\.model: blocks\.0 is a RecursiveScriptModule, .* the module from which torch\.jit made it",
        ),
        (
            {"model": around(nn.Linear(8, 9), nn.Linear(9, 8))},
            ModelError,
            r"blocks\.0 .* the shape and type of their input",
        ),
        (
            {"model": around(Half(8, 8), nn.Linear(8, 8))},
            ModelError,
            r"blocks\.0 .* in torch\.float16 for .* in torch\.float32: all layers must keep the shape and type",
        ),
        (
            {"model": lambda: [Half(4, 8), nn.Identity(), nn.Linear(8, 2)]},
            ModelError,
            r"embedding .* in torch\.float16 for a sample, but the model's activation is \(8,\) in torch\.float32",
        ),
        (
            {"model": around(spectral_norm(nn.Linear(8, 8)))},
            SpecError,
            r"blocks\.0\.parametrizations\.weight\.0\._u cha",
        ),
        ({"model": around(Averaging())}, SpecError, r"spec\.model: blocks\.0\.mean changes in each forward"),
        ({"model": around(NoWayBack(8, 8), NoWayBack(8, 8))}, ModelError, "backward failed: RuntimeError: no way back"),
        ({"model": around(Fails(OUT_OF_BOUNDS))}, ModelError, r"forward of blocks\.0 failed: .* device-side assert"),
        ({"model": around(Fails(BROKEN))}, DeviceError, r"AcceleratorError: CUDA .* ECC"),
        (
            {"data": TensorDataset(torch.zeros(8, 4), torch.full((8,), 7))},
            ModelError,
            r"loss failed: ValueError: Target 7 .* The model has 2 outputs, for the classes 0 to 1",
        ),
        (
            {"data": TensorDataset(torch.zeros(8, 4), torch.zeros(8))},
            ModelError,
            r"loss failed: TypeError: targets are torch\.float32 of shape \(\d+,\), .* return a PipelineModel that",
        ),
        ({"model": lambda: [nn.Linear(4, 8), nn.Linear(8, 2)]}, SpecError, "list of at least three modules .* of 2"),
        ({"freeze": Counting()}, SpecError, "Counting failed: TypeError: the key 3 of its state_dict must be a str"),
        (
            {"model": lambda: NoScalar(nn.Linear(4, 8), [nn.Linear(8, 8)], nn.Linear(8, 2), (8,))},
            ModelError,
            r"loss returned sums of the shapes \(\) and \(1,\): both must be scalars",
        ),
        (
            {
                "model": lambda: EachSample(nn.Linear(4, 8), [nn.Linear(8, 8)], nn.Linear(8, 2), (8,)),
                "pipeline": Pipeline(micro_batch_size=2),
            },
            ModelError,
            "loss returned a Tensor: it must return two scalars, a sum and its weight",
        ),
        (
            {"metrics": [sure], "pipeline": Pipeline(micro_batch_size=2)},
            ModelError,
            "sure returned a Tensor: it must return two scalars",
        ),
        ({"metrics": [triple]}, ModelError, "triple returned 3 values: it must return two scalars"),
        *(
            (
                {
                    "model": over_positions(unit),
                    "training": Training(steps=1, global_batch_size=16, precision=precision),
                },
                SpecError,
                rf"spec\.model: {name}: dropout of shape \(16, 6, 8\) in a micro-batch of 6 .* batch_first=True",
            )
            for unit, name in enumerate(("embedding", r"blocks\.0", r"blocks\.1", "head"))
            for precision in (Precision.FLOAT32, Precision.BFLOAT16)
        ),
        (
            {"model": around(NeedsValues())},
            SpecError,
            r"spec\.model: blocks\.0: dropout of shape \(8, 5\) in a micro-batch of 5 samples",
        ),
        (
            {"model": lambda: Number(nn.Linear(4, 8), [nn.Linear(8, 8)], nn.Linear(8, 2), (8,))},
            ModelError,
            "loss failed: TypeError: the sum of losses is a float, which has no gradient. Return a tensor",
        ),
        (
            {"model": lambda: Detached(nn.Linear(4, 8), [nn.Linear(8, 8)], nn.Linear(8, 2), (8,))},
            ModelError,
            "backward failed: RuntimeError: .* does not require grad",
        ),
        ({"data": Unreadable()}, SpecError, r"spec\.data: one of .*37.*OSError: the volume is gone"),
        ({"model": around(nn.TransformerEncoderLayer(8, 2, 8))}, SpecError, r"blocks\.0 is a .* with batch_first=True"),
        (
            {"model": around(nn.GRU(8, 8, 2, dropout=0.1))},
            SpecError,
            r"blocks\.0 is a GRU with dropout, .* set dropout=0",
        ),
        ({"model": around(OwnAttention(8, 2, dropout=0.1))}, SpecError, r"blocks\.0 is a OwnAttention with dropout"),
        (
            {"model": around(nn.EmbeddingBag(9, 8, scale_grad_by_freq=True))},
            SpecError,
            r"blocks\.0 is a EmbeddingBag with scale_grad_by_freq",
        ),
        (
            {"model": around(nn.Linear(8, 8, dtype=torch.cfloat))},
            SpecError,
            r"blocks\.0\.weight is a complex parameter",
        ),
        ({"model": around(Sparse())}, SpecError, r"spec\.model: blocks\.0\.adjacency is a sparse tensor"),
        (
            {"model": lambda: [module.requires_grad_(False) for module in around(nn.Identity())()]},
            SpecError,
            r"spec\.model: has no parameter that requires a gradient",
        ),
        (
            {"model": lambda: [Pair(), nn.Identity(), nn.Linear(8, 2)]},
            SpecError,
            "the embedding returns a tuple, not one",
        ),
        (
            {"model": lambda: [NoSamples(4, 8), nn.Identity(), nn.Linear(8, 2)]},
            SpecError,
            r"the embedding returns \(\) for one sample, not \(1, \.\.\.\): samples come first",
        ),
        (
            {"model": around(nn.LazyLinear(8))},
            SpecError,
            r"blocks\.0\.weight has no shape before the first forward: give .*, or run the model on a sample",
        ),
        (
            {"model": lambda: around(nn.Sequential(old_weight_norm(nn.Linear(8, 8))))()},
            SpecError,
            r"blocks\.0\.0\.weight is computed from parameters .* nn\.utils\.parametrizations",
        ),
        (
            {"model": lambda: [nn.Linear(5, 8), nn.Identity(), nn.Linear(8, 2)]},
            SpecError,
            "fails on the first sample: R",
        ),
        ({"data": TensorDataset(torch.zeros(0, 4), torch.zeros(0))}, SpecError, "data: has no samples to train on"),
        ({"model": around(nn.RReLU())}, SpecError, r"blocks\.0 is a RReLU, whose draws would"),
        ({"model": around(nn.Dropout1d(0.1))}, SpecError, r"blocks\.0 is a Dropout1d"),
        ({"model": around(nn.BatchNorm1d(8, track_running_stats=False))}, SpecError, r"blocks\.0 is a BatchNorm1d"),
        ({"run_dir": "/dev/null"}, StorageError, "the run's record in /dev/null"),
        ({"data": [1, 2, 3]}, SpecError, "data: is a list"),
        ({"training": Training(global_batch_size=16)}, SpecError, "exactly one of epochs and steps"),
        ({"freeze": Freeze(policy="Explicit")}, SpecError, r"spec\.freeze\.boundaries: policy Explicit needs"),
        ({"evaluation": Evaluation(best_metric="loss")}, SpecError, r"spec\.evaluation\.goal: bestMetric loss needs"),
        ({"checkpoint": Checkpoint(location="nope://x")}, SpecError, "nope://x cannot be reached from here"),
        ({"freeze": Forgetful()}, SpecError, "Forgetful failed: TypeError: Object of type Tensor is not JSON"),
        ({"freeze": Numbers()}, SpecError, "Numbers failed: TypeError: Object of type int64 is not JSON"),
        ({"schedule": Changing()}, SpecError, "schedule: Changing must be hashable: make it a frozen dataclass"),
        ({"schedule": Clumsy()}, SpecError, r"schedule: Clumsy\(\) for 1 workers and 2 chunks: IndexError: list index"),
        ({"schedule": Listed([1])}, SpecError, r"schedule: Listed must be hashable: .* its lists tuples \(unhashable"),
        ({"schedule": Spanning("2")}, SpecError, r"schedule: Spanning\.spans must be an int of at least 1, not '2'"),
        (
            {"schedule": Spanning(3), "pipeline": Pipeline(spans_per_worker=2)},
            SpecError,
            r"spec\.pipeline\.spansPerWorker: is 2, but the program's schedule Spanning has 3: leave it out",
        ),
        *(
            (
                {"schedule": Odd(action)},
                SpecError,
                r"schedule: Odd\(.*\) returned Action\(.*, which is not an Action with",
            )
            for action in (
                Action(cast(Any, 1), 0, 0),
                Action(ActionKind.FORWARD, cast(Any, "first"), 0),
                Action(ActionKind.FORWARD, 0, cast(Any, None)),
                Action(ActionKind.PREFIX, 0, 0, cast(Any, 3)),
            )
        ),
        ({"schedule": Loose()}, SpecError, r"schedule: Loose\(\) .*'forward'.* not an Action"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_what_the_user_brings_fails_with_its_own_words(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, **changes)


@pytest.mark.parametrize("action", [Action(ActionKind.FORWARD, 7, 0), Action(ActionKind.STEP, 0, 99)])
def test_a_schedule_for_another_round_is_replaced(action: Action, tmp_path: Path) -> None:
    """The leader's predictions read it, too."""
    assert run(tmp_path, schedule=Odd(action)).steps == 8


class Summed(nn.Linear):
    """Gives one number a sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(-1)


@pytest.mark.parametrize(
    "model",
    [
        lambda: [Summed(4, 8), nn.Identity(), nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 2))],
        lambda: [nn.Linear(4, 1), nn.Identity(), nn.Linear(1, 2)],
    ],
)
def test_between_two_units_may_be_one_number_alone(model: Callable[[], list[nn.Module]], tmp_path: Path) -> None:
    """And no search for a micro-batch that divides what has no positions goes on for ever."""
    assert run(tmp_path, model=model, training=Training(steps=1, global_batch_size=16)).steps == 1


def test_a_model_that_cannot_be_saved_is_no_broken_connection(tmp_path: Path) -> None:
    with (
        mock.patch(
            "pipetransformer.training.final_model.write_model", side_effect=RuntimeError("tensors share memory")
        ),
        pytest.raises(ModelError, match="cannot be saved: RuntimeError: tensors share memory"),
    ):
        run(tmp_path)


def test_a_stage_that_cannot_be_made_is_no_broken_connection(tmp_path: Path) -> None:
    """Else its workers would regroup for ever, with a step in no generation."""
    with (
        mock.patch(
            "pipetransformer.training.commit.make_optimizer", side_effect=RuntimeError("tensors on two devices")
        ),
        pytest.raises(ModelError, match="making a stage and its optimizer failed: RuntimeError: tensors on two"),
    ):
        run(tmp_path)
    assert [event["reason"] for event in events(tmp_path, "Failed")] == ["ModelFailed"]


def test_a_policy_that_fails_before_the_first_step_is_in_the_record(tmp_path: Path) -> None:
    class Stillest(FreezePolicy):
        def decide(self, observation: FreezeObservation) -> int:
            return int(max(observation.unit_gradient_norms))  # there are none yet

    with pytest.raises(SpecError, match="Stillest failed: ValueError") as error:
        run(tmp_path, freeze=Stillest())

    [event] = events(tmp_path, "Failed")
    assert event["reason"] == "PolicyFailed" and event["message"] == str(error.value)


def test_who_fails_before_training_begins_leaves_nothing_frozen_in_pythons_memory(tmp_path: Path) -> None:
    gc.unfreeze()
    with (
        mock.patch("pipetransformer.worker.trainer.warm_up", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        run(tmp_path)

    assert gc.get_freeze_count() == 0


def test_a_collection_visits_nothing_that_the_warm_up_has_made(tmp_path: Path) -> None:
    """A worker collects after each regroup. The warm-up imports so much that this would take longer than the rest."""

    class Made:
        """Something that Python's collector tracks."""

    class Looks(Callback):
        visited = True

        def on_step(self, line: Mapping[str, Any]) -> None:
            self.visited = any(isinstance(one, Made) for one in gc.get_objects())

    made: list[Made] = []
    looks = Looks()
    with mock.patch("pipetransformer.worker.trainer.warm_up", side_effect=lambda *_: made.append(Made())):
        run(tmp_path, callbacks=[looks])

    assert made and not looks.visited


@pytest.mark.parametrize(
    ("where", "failure", "words"),
    [
        ("pipetransformer.library.standalone.Trainer", StorageError("the disk is full"), "the disk is full"),
        ("pipetransformer.worker.trainer.Trainer.run", WorkersDifferError("other targets"), "data: other targets"),
        ("pipetransformer.worker.trainer.Trainer.run", ZeroDivisionError("a bug"), "a bug"),
    ],
)
def test_processes_without_a_part_are_told_whatever_the_run_fails_of(
    where: str, failure: Exception, words: str, tmp_path: Path
) -> None:
    raised = SpecError if isinstance(failure, WorkersDifferError) else type(failure)
    with (
        mock.patch(where, side_effect=failure),
        mock.patch("pipetransformer.library.standalone.World.tell_end") as told,
        pytest.raises(raised, match=words),
    ):
        run(tmp_path)
    told.assert_called_once_with({"error": words})


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """The error as it is caught where the cause was, too."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RuntimeError("Connection closed by peer"), None),
        (BROKEN, DeviceError),
        (OUT_OF_BOUNDS, ModelError),
        (raised(RuntimeError("of a schedule"), raised(BrokenGroupError("of a hook"), BROKEN)), DeviceError),
        (raised(RuntimeError("of a schedule"), SpecError("spec.model", "no")), SpecError),
        (SHORT, DeviceMemoryError),
        (torch.AcceleratorError("CUDA error: out of memory"), DeviceMemoryError),
    ],
)
def test_what_ends_a_worker_is_told_from_a_broken_connection(error: Exception, fault: type[Exception] | None) -> None:
    found = fault_of(error)
    assert found is None if fault is None else type(found) is fault


@pytest.mark.parametrize(
    ("cause", "fault"),
    [(SHORT, None), (BROKEN, DeviceError), (DeviceMemoryError("of a step that was voted for"), DeviceMemoryError)],
)
def test_a_regroup_survives_too_little_memory_unless_state_is_torn(
    cause: Exception, fault: type[Exception] | None
) -> None:
    found = fault_of(raised(RegroupError("not committed"), cause), in_regroup=True)
    assert found is None if fault is None else type(found) is fault


@pytest.mark.parametrize(("sticky", "kind"), [(BROKEN, DeviceError), (OUT_OF_BOUNDS, ModelError), (None, ModelError)])
def test_whom_a_library_blames_for_a_broken_accelerator_is_asked_of_cuda(
    sticky: Exception | None, kind: type[Exception]
) -> None:
    """As CUDA does that has failed once; not tried on an accelerator."""
    stream = mock.Mock(query=mock.Mock(return_value=False, side_effect=sticky))
    with (
        mock.patch("torch.cuda.is_initialized", return_value=True),
        mock.patch("torch.cuda.current_stream", return_value=stream),
        pytest.raises(kind, match="loss failed: RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        RunningModel("loss"),
    ):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm")


def test_a_loss_may_pass_over_a_micro_batch_in_which_it_counts_nothing(tmp_path: Path) -> None:
    def model() -> PipelineModel:
        return OfSome(nn.Linear(4, 8), [nn.Linear(8, 8)], nn.Linear(8, 2), (8,))

    training = Training(steps=2, global_batch_size=16)
    runs = [
        run(
            tmp_path / str(size),
            model=model,
            training=training,
            pipeline=Pipeline(micro_batch_size=size),
            freeze=NO_FREEZE,
        )
        for size in (16, 1)
    ]
    assert runs[1].metrics["loss"] == pytest.approx(runs[0].metrics["loss"], rel=1e-5)


def test_a_model_with_sparse_gradients_warms_up_as_it_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = TensorDataset(torch.arange(64).view(32, 2) % 9, torch.arange(32) % 2)

    result = run(
        tmp_path,
        model=lambda: [nn.Embedding(9, 8, sparse=True), nn.Linear(8, 8), nn.Sequential(nn.Flatten(), nn.Linear(16, 2))],
        data=(tokens, tokens),
        training=Training(steps=2, global_batch_size=16),
    )

    assert result.steps == 2
    assert "this worker is not warm" not in caplog.text


def test_a_worker_whose_accelerator_is_broken_ends_before_it_says_that_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.testkit.user_code.broken_device._GOOD_FORWARDS", 0)
    spec = TrainerSpec.model_validate(
        {
            "model": {"name": "tests.testkit.user_code.broken_device:breaks", "numLayers": 4},
            "data": {"name": "digits"},
            "training": {"steps": 1, "globalBatchSize": 16},
        }
    )
    with pytest.raises(DeviceError, match="uncorrectable ECC"):
        warm_up(load_job(spec), torch.device("cpu"), Reserve())
