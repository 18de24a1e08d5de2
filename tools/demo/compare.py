"""Compares the two runs: the figures of `summary.json`, and the sentence that `make demo` ends with."""

import math
from dataclasses import asdict, dataclass

from .measured import Measured

#: A difference of more standard errors than this is not called the same accuracy.
ERRORS_ALLOWED = 2.0


@dataclass(frozen=True)
class Comparison:
    """The freezing run against the unfrozen one. Shares are from 0 to 1, times in seconds.

    Attributes:
        saved_gpu_seconds_share: share of the unfrozen run's GPU-seconds that freezing saved; negative if it took more.
        gpu_seconds_unfrozen: GPU-seconds of training, as the workers held them.
        gpu_seconds_freezing: the same of the freezing run.
        accuracy_unfrozen: on the held-out images, at the end.
        accuracy_freezing: the same of the freezing run.
        accuracy_difference: freezing less unfrozen.
        accuracy_standard_error: standard error of that difference, paired by image.
        same_accuracy: whether the difference is within two standard errors.
        seconds_unfrozen: seconds of training.
        seconds_freezing: the same of the freezing run.
        first_freeze_share_of_time: when the first layers froze, as a share of the freezing run; None if none did.
        share_of_steps_packed: share of the freezing run's steps with fewer stages than at its start.
        images: number of held-out images.
    """

    saved_gpu_seconds_share: float
    gpu_seconds_unfrozen: float
    gpu_seconds_freezing: float
    accuracy_unfrozen: float
    accuracy_freezing: float
    accuracy_difference: float
    accuracy_standard_error: float
    same_accuracy: bool
    seconds_unfrozen: float
    seconds_freezing: float
    first_freeze_share_of_time: float | None
    share_of_steps_packed: float
    images: int


def compare(unfrozen: Measured, freezing: Measured) -> Comparison:
    """Compares two runs that were tested on the same images.

    Raises:
        ValueError: they were tested on different numbers of images.
    """
    if unfrozen.tested != freezing.tested:
        raise ValueError(f"the runs were tested on {unfrozen.tested} and {freezing.tested} images: they do not compare")
    before, after = unfrozen.record, freezing.record
    difference = freezing.accuracy - unfrozen.accuracy
    error = paired_error(unfrozen.wrong, freezing.wrong, freezing.tested)
    first = after.freezes[0].time / after.seconds if after.freezes else None
    return Comparison(
        saved_gpu_seconds_share=1 - after.gpu_seconds / before.gpu_seconds,
        gpu_seconds_unfrozen=before.gpu_seconds,
        gpu_seconds_freezing=after.gpu_seconds,
        accuracy_unfrozen=unfrozen.accuracy,
        accuracy_freezing=freezing.accuracy,
        accuracy_difference=difference,
        accuracy_standard_error=error,
        same_accuracy=abs(difference) <= ERRORS_ALLOWED * error,
        seconds_unfrozen=before.seconds,
        seconds_freezing=after.seconds,
        first_freeze_share_of_time=first,
        share_of_steps_packed=packed_share(freezing),
        images=freezing.tested,
    )


def paired_error(one: tuple[int, ...], other: tuple[int, ...], tested: int) -> float:
    """Standard error of the difference of two accuracies on the same images.

    Only images that one model alone gets wrong say anything about the difference (McNemar, Psychometrika 1947).
    """
    only_one, only_other = len(set(one) - set(other)), len(set(other) - set(one))
    return math.sqrt(only_one + only_other - (only_one - only_other) ** 2 / tested) / tested


def packed_share(measured: Measured) -> float:
    """Share of the steps whose layout has fewer stages than the first."""
    regroups = measured.record.regroups
    steps = len(measured.record.steps)
    ends = [*(later.first_step for later in regroups[1:]), steps]
    packed = sum(
        end - regroup.first_step
        for regroup, end in zip(regroups, ends, strict=True)
        if regroup.stages < regroups[0].stages
    )
    return packed / steps


def sentence(compared: Comparison, baseline: str) -> str:
    """What was saved, at which accuracy, in which time, and against what: one sentence.

    Args:
        compared: the figures.
        baseline: what the unfrozen run was and where it ran.
    """
    saved = compared.saved_gpu_seconds_share
    verb = f"saved {saved:.0%}" if saved >= 0 else f"saved nothing and took {-saved:.0%} more"
    same = "at the same accuracy" if compared.same_accuracy else "but not at the same accuracy"
    within = "within" if compared.same_accuracy else "more than"
    return (
        f"{verb} of GPU-seconds ({compared.gpu_seconds_unfrozen:.0f} -> {compared.gpu_seconds_freezing:.0f}) {same}"
        f" ({_accuracy(compared.accuracy_unfrozen, compared.images)} ->"
        f" {_accuracy(compared.accuracy_freezing, compared.images)} of {compared.images} test images,"
        f" difference {100 * compared.accuracy_difference:+.1f} points, {within} 2 standard errors of"
        f" {100 * compared.accuracy_standard_error:.1f}), in {compared.seconds_unfrozen:.0f} s ->"
        f" {compared.seconds_freezing:.0f} s, against {baseline}."
    )


def _accuracy(share: float, images: int) -> str:
    error = math.sqrt(share * (1 - share) / images)
    return f"{100 * share:.1f} ± {100 * error:.1f} %"


def figures(compared: Comparison, *, seconds: float, seed: int, baseline: str) -> dict[str, object]:
    """The content of `summary.json`. `seconds` is how long the whole demo took."""
    return {**asdict(compared), "seconds": seconds, "seed": seed, "baseline": baseline}
