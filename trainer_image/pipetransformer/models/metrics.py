"""Metrics of an evaluation: quotients of two sums over the held-out samples, so that workers only have to add."""

from collections.abc import Callable, Iterable

from torch import Tensor

from pipetransformer.errors import SpecError
from pipetransformer.user_code import import_function
from pipetransformer_contract.spec import Evaluation

from . import PipelineModel, target_weights

#: Maps one micro-batch's (output, target, weight), as a model's loss gets them, to two scalars, tensors or numbers: the
#: terms of numerator and denominator. Accuracy is (correct, samples), F1 is (2 tp, 2 tp + fp + fn), loss (sum, weight).
Metric = Callable[[Tensor, Tensor, Tensor], tuple[Tensor | float, Tensor | float]]

LOSS, ACCURACY = "loss", "accuracy"


def make_metrics(
    spec: Evaluation, model: PipelineModel, targets: Tensor, own: Iterable[Metric] = ()
) -> dict[str, Metric]:
    """Loss, accuracy, the spec's imported metrics and the program's own, by the names of their functions.

    There is no accuracy if targets are not classes and the model does not replace `correct`.

    Args:
        spec: names the imported metrics and the one that decides.
        model: for its `loss` and `correct`.
        targets: targets of some samples.
        own: metrics of the program.

    Raises:
        SpecError: a metric cannot be imported, two have the same name, or `bestMetric` names none of them (accuracy is
            always allowed).
    """
    metrics: dict[str, Metric] = {LOSS: model.loss}
    if type(model).correct is not PipelineModel.correct or not targets.is_floating_point():
        metrics[ACCURACY] = accuracy_of(model)
    imported = [import_function(path, field="spec.evaluation.metrics") for path in spec.metrics]
    for metric in [*imported, *own]:
        name = name_of(metric)
        if name in metrics:
            raise SpecError("spec.evaluation.metrics", f"two metrics are named {name!r}")
        metrics[name] = metric
    if spec.best_metric not in (*metrics, ACCURACY):
        raise SpecError(
            "spec.evaluation.bestMetric", f"Unknown metric {spec.best_metric!r}. Available: {', '.join(metrics)}"
        )
    return metrics


def name_of(metric: Metric) -> str:
    """The name of the metric's function or class."""
    name: str = getattr(metric, "__name__", type(metric).__name__)
    return name


def accuracy_of(model: PipelineModel) -> Metric:
    """The share of targets that the model gets right.

    All targets count alike, even if the loss weights their classes. If a subclass replaces `correct`, the loss's weight
    is the denominator.
    """
    counts_targets = type(model).correct is PipelineModel.correct

    def accuracy(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        correct = model.correct(output, target, weight)
        if counts_targets:
            return correct, target_weights(target, weight).sum()
        return correct, model.loss(output, target, weight)[1]

    return accuracy
