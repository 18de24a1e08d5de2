"""Objects that a program passes to `train` and that a spec cannot hold, such as its model function.

In a pod the manifest decides all else. It names each object that the program must pass `script`. So neither the
manifest nor the program replaces a part of the other unnoticed.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset as TorchDataset

from pipetransformer.callbacks.callback import Callback
from pipetransformer.data import Dataset, Processor, Table
from pipetransformer.errors import SpecError
from pipetransformer.freeze import FreezePolicy
from pipetransformer.models import ModelFunction, PipelineModel
from pipetransformer.models.metrics import Metric
from pipetransformer.schedules import Schedule
from pipetransformer_contract.spec import SCRIPT, FreezePolicyName, ScheduleName, TrainerSpec

#: Largest number of characters of a value in a message.
_SHOWN = 80
#: A `Dataset`, a map-style dataset of (input, target), a table of the `datasets` library, or two of these: training and
#: held-out samples.
ScriptData = Dataset | TorchDataset[Any] | Table | Mapping[str, Table] | Sequence[TorchDataset[Any]] | Sequence[Table]


@dataclass(frozen=True, slots=True)
class Overruled:
    """A field that the program and the manifest set to different values. The manifest wins.

    Attributes:
        field: path of the field, such as `spec.training.epochs`.
        script: the program's value.
        manifest: the manifest's value; None if it has none.
    """

    field: str
    script: Any
    manifest: Any


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects that a program passes to `train`; None for those that the spec describes.

    Attributes:
        model: the function that builds the model.
        data: the samples.
        freeze: the freeze policy.
        schedule: the pipeline schedule.
        metrics: metrics in addition to those of the spec.
        callbacks: objects that the leader tells about the training.
        processor: the tokenizer or image processor that made the inputs of `data`.
        said: in a pod, the spec that the program's other arguments make. The manifest overrules it.
    """

    model: ModelFunction | None = None
    data: ScriptData | None = None
    freeze: FreezePolicy | None = None
    schedule: Schedule | type | None = None
    metrics: Sequence[Metric] = ()
    callbacks: Sequence[Callback] = ()
    processor: Processor | None = None
    said: TrainerSpec | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            SpecError: a part has the wrong type.
        """
        model, freeze = self.model, self.freeze
        _check_model(model)
        for name, part, fits, wanted in (
            (
                "model",
                model,
                model is None or callable(model),
                "a Model, or a function without arguments that returns a PipelineModel or a list of modules",
            ),
            (
                "processor",
                self.processor,
                self.processor is None or callable(getattr(self.processor, "save_pretrained", None)),
                "a tokenizer or image processor of transformers",
            ),
            ("freeze", freeze, freeze is None or isinstance(freeze, FreezePolicy), "a Freeze, or a FreezePolicy"),
            ("metrics", self.metrics, _is_list(self.metrics, Callable), "a list of functions"),
            ("callbacks", self.callbacks, _is_list(self.callbacks, Callback), "a list of Callback objects"),
        ):
            if not fits:
                raise SpecError(name, f"must be {wanted}, not {shown(part)}")

    def check(self, spec: TrainerSpec) -> None:
        """Check that the program passes exactly the objects that the spec names `script`.

        Raises:
            SpecError: the program does not pass such an object, or passes one that the spec describes.
        """
        for field, part, said, script, keyword in (
            ("spec.model.name", self.model, spec.model.name, SCRIPT, "model"),
            ("spec.data.name", self.data, spec.data.name, SCRIPT, "data"),
            ("spec.freeze.policy", self.freeze, spec.freeze.policy, FreezePolicyName.SCRIPT, "freeze policy"),
            ("spec.pipeline.schedule", self.schedule, spec.pipeline.schedule, ScheduleName.SCRIPT, "schedule"),
        ):
            if part is None and said == script:
                raise SpecError(field, f"is {script}, but this program passes no {keyword} to pipetransformer.train")
            if part is not None and said != script:
                raise SpecError(
                    field,
                    f"is {said}, but this program passes its own {keyword} to pipetransformer.train: "
                    f"say {script} here, or do not pass it",
                )

    def overruled(self, spec: TrainerSpec) -> list[Overruled]:
        """The fields that the program sets to another value than `spec`, the manifest's spec."""
        if self.said is None:
            return []
        holds = dict(_leaves(spec.model_dump(mode="json", by_alias=True)))
        said = _leaves(self.said.model_dump(mode="json", by_alias=True, exclude_unset=True))
        return [Overruled(field, value, holds.get(field)) for field, value in said if value != holds.get(field)]


def place_of_function(function: ModelFunction | None) -> str:
    """The name `module:function` that lets another program import a function; empty if it has none, as a lambda."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
    return f"{module}:{name}" if module and name.isidentifier() else ""


def shown(value: object) -> str:
    """A value as one short line for a message."""
    words = " ".join(repr(value).split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def _check_model(model: object) -> None:
    """Refuse a model that is already built. `train` needs a function, because every worker builds the model itself.

    Raises:
        SpecError: says what to pass instead.
    """
    if isinstance(model, nn.Module):
        name = type(model).__name__
        if hasattr(model, "save_pretrained"):
            how = 'save it by save_pretrained(FOLDER), and pass Model(name="huggingface", path=FOLDER, num_layers=...)'
        else:
            how = (
                f"pass a function that returns it as a list of modules (embedding, layers, head), not {name} as a whole"
            )
        raise SpecError("model", f"is an nn.Module, {shown(model)}: {how}")
    if isinstance(model, PipelineModel) or (
        isinstance(model, list | tuple) and model and all(isinstance(part, nn.Module) for part in model)
    ):
        words = "pass the function that builds it, because every worker calls it"
        raise SpecError("model", f"is already built, {shown(model)}: {words}")
    if isinstance(model, str):
        raise SpecError("model", f"is {model!r}: pass Model(name={model!r}, ...), or a function that builds a model")


def _is_list(part: object, kind: Any) -> bool:
    return isinstance(part, Sequence) and all(isinstance(item, kind) for item in part)


def _leaves(value: Mapping[str, Any], path: str = "spec") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _leaves(item, f"{path}.{name}")
        else:
            yield f"{path}.{name}", item
