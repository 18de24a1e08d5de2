"""Metrics of an evaluation. Each is a quotient of two sums over the held-out samples, which workers can add up."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps

import torch
from torch import Tensor

from pipetransformer.errors import SpecError
from pipetransformer.user_code import import_function
from pipetransformer_contract.spec import Evaluation

from . import PipelineModel, current_micro_batch, set_micro_batch, target_weights

#: Takes (output, target, weight) of a micro-batch, as a model's `loss` does. Returns two scalars, tensors or numbers.
#: They are added to numerator and denominator: (correct, samples) for accuracy, (2 tp, 2 tp + fp + fn) for F1.
Metric = Callable[[Tensor, Tensor, Tensor], tuple[Tensor | float, Tensor | float]]

LOSS, ACCURACY = "loss", "accuracy"
#: Samples whose losses `checking_sums` compares.
_CHECKED = 4
_TOGETHER = "samples together do not give the sum of what each gives alone"
_PADDING = "samples of weight 0, which only pad a micro-batch, count"


def make_metrics(
    spec: Evaluation, model: PipelineModel, targets: Tensor, script_metrics: Iterable[Metric]
) -> dict[str, Metric]:
    """The metrics of a job by name: loss, accuracy, those that the spec imports, and those of the user's program.

    There is no accuracy if targets are floating-point numbers and the model does not replace `correct`.

    Args:
        spec: names the metrics to import, and the metric that decides which model is best.
        model: gives `loss` and `correct`.
        targets: targets of some samples.
        script_metrics: metrics of the user's program.

    Raises:
        SpecError: a metric cannot be imported, two have the same name, or `bestMetric` is not one of them. It may
            always be accuracy.
    """
    metrics: dict[str, Metric] = {LOSS: model.loss}
    if type(model).correct is not PipelineModel.correct or not targets.is_floating_point():
        metrics[ACCURACY] = accuracy_of(model)
    imported = [import_function(path, field="spec.evaluation.metrics") for path in spec.metrics]
    for metric in [*imported, *script_metrics]:
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


def checking_sums(loss: Metric) -> Metric:
    """The loss as a metric that also checks that its sums over a micro-batch are those over its samples.

    Schedules and layouts cut a batch into micro-batches, so another loss would depend on them.

    Raises:
        SpecError: the sums differ, or a sample of weight 0 counts.
    """

    @wraps(loss)
    def checked(output: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor | float, Tensor | float]:
        whole = loss(output, target, weight)
        count = min(_CHECKED, len(weight))
        if _are_sums(whole) and len(output) == len(weight):  # a head may return other rows than samples
            context = current_micro_batch()

            def sums(start: int, stop: int, weights: Tensor) -> list[float]:
                set_micro_batch(context.of_samples(slice(start, stop)))
                return [float(each) for each in loss(output[start:stop].clone(), target[start:stop], weights)]

            ones = torch.ones(count, dtype=weight.dtype, device=weight.device)
            alone = [sums(place, place + 1, ones[:1]) for place in range(count)]
            first = torch.zeros_like(ones)
            first[0] = 1
            _compare(sums(0, count, ones), [sum(parts) for parts in zip(*alone, strict=True)], _TOGETHER)
            _compare(sums(0, count, first), alone[0], _PADDING)
            set_micro_batch(context)
        return whole

    return checked


def _are_sums(found: object) -> bool:
    """Whether a loss returned two scalars with values. What takes them refuses anything else."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        return False
    return all(not isinstance(each, Tensor) or (each.dim() == 0 and not each.is_meta) for each in found)


def _compare(found: Sequence[float], wanted: Sequence[float], words: str) -> None:
    """Check that sums of losses and weights are equal except for rounding. Sums that are not finite tell nothing."""
    for one, other in zip(found, wanted, strict=True):
        if math.isfinite(one) and math.isfinite(other) and not math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6):
            raise SpecError(
                "spec.model",
                f"{words} in the loss: it gives {one:g} where {other:g} is expected. Return the sum of the samples'"
                " losses, each times its weight, and the sum of their weights",
            )


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
