"""Which runs are made, and in which order: what matters most comes first, because a run can be stopped any time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.worth.data import UnreachableError

from .policies import FEWER_EPOCHS, LORA, NONE, PAPER, TRIAL, Policy, policies
from .tasks import FAR, NEAR, VIT_MNIST8, Task, brown_task, slow

#: The recommended setting is chosen on the first seeds, and confirmed on others.
CHOOSING, CONFIRMING = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)
_SHORT_SEEDS = (0, 1, 2)
_SHORTER = tuple(f"{FEWER_EPOCHS}_{share}" for share in ("37_5", "50", "62_5"))
_SHORT = (NONE, PAPER, f"{PAPER}_from_25", f"{PAPER}_from_25{TRIAL}", *_SHORTER, "top_6")
_CORE = (
    NONE, *_SHORTER, PAPER, f"{PAPER}_from_25", f"{PAPER}_from_37_5", f"{PAPER}_from_25{TRIAL}", "gradient_norm",
    "top_2", "top_4", "top_6",
)  # fmt: skip
_OF_SIX_LAYERS = (NONE, f"{PAPER}_from_25", *_SHORTER, PAPER, "top_3", "top_2", f"{PAPER}_from_25{TRIAL}", LORA)
_SLOW = (NONE, *_SHORTER, PAPER, f"{PAPER}_from_25", f"{PAPER}_from_37_5", "top_4", "top_6")


@dataclass(frozen=True)
class Part:
    """A task with its policies.

    Attributes:
        make: the task.
        work_limit: the most work, with cache, of a setting that may be recommended.
        core: names of the policies that are run first, on all seeds that a setting is chosen on.
        whole: whether all other policies follow.
    """

    name: str
    make: Callable[[], Task]
    work_limit: float
    core: tuple[str, ...]
    whole: bool = False

    def policies(self, task: Task) -> list[Policy]:
        """The core, then the others."""
        known = policies(task.model.num_layers)
        others = [policy for name, policy in known.items() if name not in self.core]
        return [known[name] for name in self.core] + (others if self.whole else [])


def near() -> Task:
    """
    Raises:
        UnreachableError: its pretrained model is not there.
    """
    if not (VIT_MNIST8 / "model.safetensors").is_file():
        raise UnreachableError(f"{VIT_MNIST8.name} is not there: make it by `make pretrained`")
    return NEAR


def far() -> Task:
    """Raises the errors of `data.fetch`."""
    FAR.samples()
    FAR.weights_file()
    return FAR


PARTS = (
    Part("near", near, 0.6, _CORE, whole=True),
    Part("far", far, 0.6, _CORE, whole=True),
    Part("brown", brown_task, 0.7, _OF_SIX_LAYERS, whole=True),
    Part("far_slow", lambda: slow(far(), 0.1), 0.6, _SLOW),
    Part("near_slow", lambda: slow(near(), 0.1), 0.6, _SLOW),
)


def short() -> Iterator[tuple[Part, Sequence[int]]]:
    """The parts of the short form, with their seeds."""
    for part in PARTS[:2]:
        yield replace(part, core=_SHORT, whole=False), _SHORT_SEEDS
