"""What a program passes to `train` as objects, because no spec can say it.

In a pod the manifest holds for all that it can say. What comes from the program instead is named `script` there, so
neither side can replace the other's part unnoticed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Dataset as TorchDataset

from pipetransformer_contract.spec import SCRIPT, FreezePolicyName, ScheduleName, TrainerSpec

from .callbacks import Callback
from .data import Dataset
from .errors import SpecError
from .freeze import FreezePolicy
from .metrics import Metric
from .models import PipelineModel
from .schedules import ScheduleClass

#: Builds a whole model: a `PipelineModel`, or a list of modules (embedding, blocks, head) that classifies.
ModelFunction = Callable[[], PipelineModel | Sequence[nn.Module]]
#: A `Dataset`, a map-style dataset of (input, target), or two of them: training and held-out samples.
OwnData = Dataset | TorchDataset[Any] | Sequence[TorchDataset[Any]]


@dataclass(frozen=True, slots=True)
class Parts:
    """Each part that is not None takes the place of what the spec would name; metrics are added to the spec's."""

    model: ModelFunction | None = None
    data: OwnData | None = None
    freeze: FreezePolicy | None = None
    schedule: ScheduleClass | None = None
    metrics: Sequence[Metric] = ()
    callbacks: Sequence[Callback] = ()

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
