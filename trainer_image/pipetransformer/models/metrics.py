"""What an evaluation counts: quotients of two sums over the held-out samples, so that workers only have to add."""

from collections.abc import Callable, Iterable

from torch import Tensor

from pipetransformer.errors import SpecError
from pipetransformer.user_code import import_function
from pipetransformer_contract.spec import Evaluation

from . import PipelineModel, target_weights

#: Of one micro-batch's (output, target, weight), as a model's loss gets them: what to sum for numerator and
#: denominator, both scalars, tensors or numbers. Accuracy is (correct, samples), F1 is (2 tp, 2 tp + fp + fn), the loss
#: (sum, weight).
Metric = Callable[[Tensor, Tensor, Tensor], tuple[Tensor | float, Tensor | float]]

LOSS, ACCURACY = "loss", "accuracy"


def make_metrics(
    spec: Evaluation, model: PipelineModel, targets: Tensor, own: Iterable[Metric] = ()
) -> dict[str, Metric]:
    """Loss and accuracy of the model, what the spec imports and what a program brings, each by its function's name.
    There is no accuracy where targets are no classes and the model does not say itself what is correct.

    Args:
        spec: what it imports, and what decides.
        model: for its loss and what it calls correct.
        targets: of some samples.
        own: what a program brings.

    Raises:
        SpecError: one does not import, two have one name, or the metric that decides is not among them, but for
            accuracy.
    """
    metrics: dict[str, Metric] = {LOSS: model.loss}
    if type(model).correct is not PipelineModel.correct or not targets.is_floating_point():
        metrics[ACCURACY] = accuracy_of(model)
    imported = [import_function(path, field="spec.evaluation.metrics") for path in spec.metrics]
    for metric in [*imported, *own]:
        name = name_of(metric)
        if name in metrics:
            raise SpecError("spec.evaluation.metrics", f"two metrics are called {name!r}")
        metrics[name] = metric
    if spec.best_metric not in (*metrics, ACCURACY):
        raise SpecError("spec.evaluation.bestMetric", f"is {spec.best_metric!r}, none of {', '.join(metrics)}")
    return metrics


def name_of(metric: Metric) -> str:
    """That of its function, or of its class."""
    name: str = getattr(metric, "__name__", type(metric).__name__)
    return name


def accuracy_of(model: PipelineModel) -> Metric:
    """What the model calls correct, of all targets, whatever weights its loss gives them, such as those of classes.
    Where `correct` is replaced, only its author knows what counts: what weighs in the loss."""
    counts_targets = type(model).correct is PipelineModel.correct

    def accuracy(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        correct = model.correct(output, target, weight)
        if counts_targets:
            return correct, target_weights(target, weight).sum()
        return correct, model.loss(output, target, weight)[1]

    return accuracy
