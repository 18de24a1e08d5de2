"""Metrics of an evaluation. Each is a quotient of two sums over the held-out samples, which workers can add up."""

from collections.abc import Callable, Iterable

from torch import Tensor

from pipetransformer.errors import SpecError
from pipetransformer.user_code import import_function
from pipetransformer_contract.spec import Evaluation

from . import PipelineModel, target_weights

#: Takes (output, target, weight) of a micro-batch, as a model's `loss` does. Returns two scalars, tensors or numbers.
#: They are added to numerator and denominator: (correct, samples) for accuracy, (2 tp, 2 tp + fp + fn) for F1.
Metric = Callable[[Tensor, Tensor, Tensor], tuple[Tensor | float, Tensor | float]]

LOSS, ACCURACY = "loss", "accuracy"


def make_metrics(spec: Evaluation, model: PipelineModel, targets: Tensor, own: Iterable[Metric]) -> dict[str, Metric]:
    """The metrics of a job by name: loss, accuracy, those that the spec imports, and those of the user's program.

    There is no accuracy if targets are floating-point numbers and the model does not replace `correct`.

    Args:
        spec: names the metrics to import, and the metric that decides which model is best.
        model: gives `loss` and `correct`.
        targets: targets of some samples.
        own: metrics of the user's program.

    Raises:
        SpecError: a metric cannot be imported, two have the same name, or `bestMetric` is not one of them. It may
            always be accuracy.
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
    """The metric accuracy: the share of targets that the model gets right.

    All targets count the same, even if the loss weights classes. If the model's class replaces `correct`, it is divided
    by the weight that its `loss` returns.
    """
    counts_targets = type(model).correct is PipelineModel.correct

    def accuracy(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        correct = model.correct(output, target, weight)
        if counts_targets:
            return correct, target_weights(target, weight).sum()
        return correct, model.loss(output, target, weight)[1]

    return accuracy
