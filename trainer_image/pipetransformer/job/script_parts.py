"""What a program passes to `train` as objects, because no spec can say it.

In a pod the manifest holds for all that it can say. What comes from the program instead is named `script` there, so
neither side can replace the other's part unnoticed.
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
from pipetransformer.models import PipelineModel
from pipetransformer.models.metrics import Metric
from pipetransformer.pipeline import ScheduleClass
from pipetransformer_contract.spec import SCRIPT, FreezePolicyName, ScheduleName, TrainerSpec

#: Characters of a value in a message.
_SHOWN = 80
#: Builds a whole model: a `PipelineModel`, or a list of modules (embedding, blocks, head) that classifies.
ModelFunction = Callable[[], PipelineModel | Sequence[nn.Module]]
#: A `Dataset`, a map-style dataset of (input, target), a table of the `datasets` library, or two of these: training and
#: held-out samples.
OwnData = Dataset | TorchDataset[Any] | Table | Mapping[str, Table] | Sequence[TorchDataset[Any]] | Sequence[Table]


@dataclass(frozen=True, slots=True)
class Overruled:
    """A field that the program sets to something else than the manifest, which holds; None where that has no value."""

    field: str
    script: Any
    manifest: Any


@dataclass(frozen=True, slots=True)
class Parts:
    """Each part that is not None takes the place of what the spec would name; metrics are added to the spec's.

    `processor` made the inputs of `data`. `said` is the rest of what the program says, in a pod: there the manifest
    holds.
    """

    model: ModelFunction | None = None
    data: OwnData | None = None
    freeze: FreezePolicy | None = None
    schedule: ScheduleClass | None = None
    metrics: Sequence[Metric] = ()
    callbacks: Sequence[Callback] = ()
    processor: Processor | None = None
    said: TrainerSpec | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            SpecError: a part is of another kind than its annotation, and would fail later or be taken for nothing.
        """
        model, freeze = self.model, self.freeze
        _check_model(model)
        for name, part, fits, wanted in (
            (
                "model",
                model,
                model is None or callable(model),
                "a Model, or a function without arguments that builds one: a PipelineModel or a list of modules",
            ),
            (
                "processor",
                self.processor,
                self.processor is None or callable(getattr(self.processor, "save_pretrained", None)),
                "a tokenizer or image processor of transformers",
            ),
            ("freeze", freeze, freeze is None or isinstance(freeze, FreezePolicy), "a Freeze, or a FreezePolicy"),
            ("metrics", self.metrics, _is_list(self.metrics, callable), "a list of functions"),
            ("callbacks", self.callbacks, _is_list(self.callbacks, _is_callback), "a list of Callback objects"),
        ):
            if not fits:
                raise SpecError(name, f"must be {wanted}, not {shown(part)}")

    def check(self, spec: TrainerSpec) -> None:
        """Refuse a spec and a program that contradict each other.

        Raises:
            SpecError: the spec names a part that the program does not pass, or the other way round.
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
        """What the program says and the spec has otherwise."""
        if self.said is None:
            return []
        holds = dict(_leaves(spec.model_dump(mode="json", by_alias=True)))
        said = _leaves(self.said.model_dump(mode="json", by_alias=True, exclude_unset=True))
        return [Overruled(field, value, holds.get(field)) for field, value in said if value != holds.get(field)]


def place_of_function(function: ModelFunction | None) -> str:
    """`module:function` by which another program can import it; empty where it cannot, as of a lambda."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
    return f"{module}:{name}" if module and name.isidentifier() else ""


def shown(value: object) -> str:
    """What was given, as a short line."""
    words = " ".join(repr(value).split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def _check_model(model: object) -> None:
    """Refuse a network that is made already: every worker makes its own, with weights that the seed says.

    Raises:
        SpecError: saying what to pass instead.
    """
    if isinstance(model, nn.Module):
        name = type(model).__name__
        if hasattr(model, "save_pretrained"):
            how = 'save it by save_pretrained(FOLDER), and pass Model(name="huggingface", path=FOLDER, num_layers=...)'
        else:
            how = (
                f"pass a function that builds it as a list of modules (embedding, blocks, head), not {name} as a whole"
            )
        raise SpecError("model", f"is an nn.Module, {shown(model)}: {how}")
    if isinstance(model, PipelineModel) or (
        isinstance(model, list | tuple) and model and all(isinstance(part, nn.Module) for part in model)
    ):
        words = "pass the function that builds it, because every worker calls it"
        raise SpecError("model", f"is made already, {shown(model)}: {words}")
    if isinstance(model, str):
        raise SpecError("model", f"is {model!r}: pass Model(name={model!r}, ...), or a function that builds a model")


def _is_list(part: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(part, Sequence) and all(map(fits, part))


def _is_callback(part: object) -> bool:
    return isinstance(part, Callback)


def _leaves(value: Mapping[str, Any], path: str = "spec") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _leaves(item, f"{path}.{name}")
        else:
            yield f"{path}.{name}", item
