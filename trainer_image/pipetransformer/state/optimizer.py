"""Makes an optimizer whose state is kept by whole-model parameter names, so that it can move between workers.

The trainer owns the moments, a mapping from parameter names to tensors. torch's optimizer updates them in place. After
a regroup or a freeze a new optimizer continues with the same moments. Frozen parameters are not in the optimizer,
because decay and momentum would move them even with a zero gradient.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.errors import SpecError
from pipetransformer.models import PipelineModel
from pipetransformer_contract.spec import LearningRateSchedule, LearningRateShape, Optimizer, OptimizerName

from .packed_parameters import STEP_COUNT, Pack
from .prediction import LAST_GRADIENT

#: Optimizer state by whole-model parameter name, then by the optimizer's own key such as `exp_avg`.
Moments = dict[str, dict[str, Tensor]]


def make_optimizer(
    spec: Optimizer,
    parameters: Iterable[tuple[str, nn.Parameter]],
    moments: Moments,
    no_decay: Collection[str] = (),
    packs: Sequence[Pack] = (),
    *,
    predicts: bool = False,
) -> torch.optim.Optimizer | None:
    """Make an optimizer that keeps its state in `moments`. Returns None if there are no parameters.

    Args:
        spec: the optimizer in the spec.
        parameters: the parameters that train, by whole-model name.
        moments: the optimizer's state by whole-model name. State that it lacks is added.
        no_decay: names of the parameters without weight decay.
        packs: groups of parameters that are updated as one tensor. Their data and moments move into it. All parameters
            of a pack must have begun to train at the same step.
        predicts: whether the moments of packs include what `prediction.predict` needs.
    """
    packed = {name for pack in packs for name in pack.parameters}
    named: list[tuple[str, nn.Parameter]] = []
    states: dict[Tensor, dict[str, Tensor]] = {}
    for name, parameter in parameters:
        state = moments.setdefault(name, {})
        if name not in packed:
            named.append((name, parameter))
            states[parameter] = state
            continue
        for key, (shape, dtype) in moment_shapes(spec, parameter, predicts=predicts).items():
            if key not in state:
                device = None if key == STEP_COUNT else parameter.device
                state[key] = torch.zeros(shape, dtype=dtype, device=device)
    for pack in packs:
        whole = pack.join()
        named.append((next(iter(pack.parameters)), whole))
        states[whole] = pack.join_moments(moments)
    if not named:
        return None
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in named if name not in no_decay]},
        {"params": [parameter for name, parameter in named if name in no_decay], "weight_decay": 0.0},
    ]
    trained = [group for group in groups if group["params"]]
    optimizer = _make(spec, trained)
    optimizer.state.update(states)
    return optimizer


def _make(spec: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    match spec.name:
        case OptimizerName.ADAMW:
            return torch.optim.AdamW(groups, betas=(spec.beta1, spec.beta2), eps=spec.epsilon, **common)
        case OptimizerName.ADAM:
            return torch.optim.Adam(groups, betas=(spec.beta1, spec.beta2), eps=spec.epsilon, **common)
        case OptimizerName.RMSPROP:
            return torch.optim.RMSprop(groups, alpha=spec.alpha, eps=spec.epsilon, **common)
        case OptimizerName.SGD:
            return torch.optim.SGD(groups, momentum=spec.momentum, **common)


def names_without_decay(patterns: Sequence[str], model: PipelineModel) -> frozenset[str]:
    """Whole-model names of the parameters that match a pattern of `noDecay`, and of those shared with them.

    Raises:
        SpecError: a pattern matches nothing.
    """
    names = [
        (index, name, f"{model.unit_name(index)}.{name}")
        for index, unit in enumerate(model.units)
        for name, _ in unit.named_parameters()
    ]
    found = set()
    for pattern in patterns:
        matches = [(index, name, full) for index, name, full in names if fnmatchcase(full, pattern)]
        if not matches:
            raise SpecError(
                "spec.training.optimizer.noDecay",
                f"{pattern!r} matches no parameter that trains; for example, {names[-1][2]} is one",
            )
        for index, name, full in matches:
            tie = model.ties.find(index, name)
            copies = () if tie is None else tie.places
            found |= {full, *(f"{model.unit_name(unit)}.{copy}" for unit, copy in copies)}
    return frozenset(found)


def moment_shapes(
    spec: Optimizer, parameter: Tensor, *, predicts: bool = False
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of each entry in a parameter's optimizer state after its first step. With `predicts` there are all
    entries that `prediction.predict` needs."""
    like = (parameter.shape, parameter.dtype)
    count = {STEP_COUNT: (torch.Size(), torch.float32)}
    last = {LAST_GRADIENT: like} if predicts else {}
    match spec.name:
        case OptimizerName.ADAM | OptimizerName.ADAMW:
            return count | {"exp_avg": like, "exp_avg_sq": like}
        case OptimizerName.RMSPROP:
            return count | {"square_avg": like} | last
        case OptimizerName.SGD:
            return {"momentum_buffer": like} if spec.momentum else last


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(spec: Optimizer, schedule: LearningRateSchedule, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (from 0). It rises linearly in the warm-up. Then it stays, or falls in the
    schedule's shape to zero after the last step."""
    if step < schedule.warmup_steps:
        return spec.learning_rate * (step + 1) / schedule.warmup_steps
    if schedule.shape is LearningRateShape.CONSTANT:
        return spec.learning_rate
    progress = (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps)
    if schedule.shape is LearningRateShape.LINEAR:
        return spec.learning_rate * (1 - progress)
    return spec.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
