"""Makes the random draws in a unit's code, such as `functional.dropout`, independent of the layout.

By itself such code draws from the process's random state, so results would depend on the layout. In training, the usual
functions instead draw from a key of seed, step, sample and place, as our dropout modules do. Other draws are refused.
The first forward of a unit shows whether it draws. If it does not, later forwards have no overhead.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from pipetransformer.errors import SpecError
from pipetransformer.models.context import current_micro_batch
from pipetransformer.models.unchanged import watching

from .dropout import keyed_dropout, keyed_uniform, softmax_of, watchers

_ATTRIBUTE = "_pipetransformer_draws"
#: The file that runs units, also from torch's checkpoint, with the context of their micro-batch.
_RUNS_UNITS = str(Path(__file__).parent.with_name("run.py"))


def key_draws(unit: nn.Module, name: str, *, seed: int, place: int) -> None:
    """Prepare a unit, so that `drawing` makes its draws depend on this seed and place.

    Args:
        unit: the unit. No other unit of the model may be the same object.
        name: the unit's name, for error messages.
        seed: the job's seed.
        place: number of this place of draws; no other place in the model has it.
    """
    unit.__dict__[_ATTRIBUTE] = _Draws(name, seed, place)


def drawing(unit: nn.Module, device: torch.device) -> AbstractContextManager[object]:
    """A context for a forward of the unit, which may draw random numbers on this device or on the CPU.

    Raises:
        SpecError: on exit, if the forward drew from the process's random state, or changed a parameter or a buffer.
    """
    draws: _Draws | None = unit.__dict__.get(_ATTRIBUTE)
    return nullcontext() if draws is None else draws.around(unit, device)


@dataclass
class _Draws:
    """The draws of a unit.

    Attributes:
        name: the unit's name, for error messages.
        seed: the job's seed.
        place: number of this place of draws, unique in the model.
        known: whether the unit's forward draws, by `unit.training`, once a first forward has shown it.
    """

    name: str
    seed: int
    place: int
    known: dict[bool, bool] = field(default_factory=dict)

    def around(self, unit: nn.Module, device: torch.device) -> AbstractContextManager[object]:
        known = self.known.get(unit.training)
        if known is None:
            return self._first(unit, device)
        return _Keyed(self.seed, self.place) if known else nullcontext()

    @contextmanager
    def _first(self, unit: nn.Module, device: torch.device) -> Iterator[None]:
        keyed, training = _Keyed(self.seed, self.place), unit.training
        begins = current_micro_batch().step == 0
        # `keyed` is not used in evaluation, because torch's modules would leave their fast path under such a mode.
        watchers.append(self._refuse_checkpoint)
        try:
            with (
                watching(unit, self.name, exactly=begins),
                _Watch(device, self._refuse_reentrant if training and torch.is_grad_enabled() else None) as watch,
                keyed if training else nullcontext(),
            ):
                yield
        finally:
            watchers.remove(self._refuse_checkpoint)
        if watch.drawn:
            words = f"{self.name} draws random numbers by {watch.drawn}"
            if training:
                raise SpecError(
                    "spec.model",
                    f"{words}, which would depend on the layout: use nn.Dropout, functional.dropout, "
                    "scaled_dot_product_attention, torch.rand or bernoulli_ with samples first, or a KeyedDropout",
                )
            raise SpecError(
                "spec.model",
                f"{words} also while it is frozen or evaluated: draw only if self.training, as "
                "functional.dropout(x, p, self.training) does",
            )
        self.known[training] = keyed.drew

    def _refuse_checkpoint(self) -> None:
        """Refuse a draw inside torch.utils.checkpoint. Its recomputation would draw for other samples, those of the
        micro-batch that is current then."""
        if _in_checkpoint():
            raise SpecError(
                "spec.model",
                f"{self.name} draws random numbers within torch.utils.checkpoint, whose recomputation would draw "
                "others: run the code without checkpoint, and set training.activationCheckpointing",
            )

    def _refuse_reentrant(self) -> None:
        """Refuse a reentrant torch.utils.checkpoint, which runs an operation without gradients. Its result needs no
        gradient if its input needs none, as the first layer's input after a freeze."""
        if _in_checkpoint():
            raise SpecError(
                "spec.model",
                f"{self.name} uses a reentrant torch.utils.checkpoint, through which no parameter trains once the"
                " layers before are frozen: pass use_reentrant=False, or set training.activationCheckpointing",
            )


def _in_checkpoint() -> bool:
    """Whether torch.utils.checkpoint, called by a unit's own code, runs the caller."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename != _RUNS_UNITS:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


class _Keyed(TorchFunctionMode):
    """A mode that replaces torch's random functions by the keyed ones in `_OURS`. `drew`: whether one has drawn."""

    def __init__(self, seed: int, place: int) -> None:
        super().__init__()
        self._randomness = {"seed": seed, "place": place}
        self.drew = False

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        ours, kwargs = _OURS.get(func), kwargs or {}
        if ours is not None and kwargs.get("generator") is None and kwargs.get("out") is None:
            output = ours(self._randomness, *args, **kwargs)
            if output is not None:
                self.drew = True
                return output
        return func(*args, **kwargs)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes in `drawn` the first operation that changes the process's random state. It sees only this
    thread, because callbacks in other threads may draw too.

    Args:
        device: of the forward.
        on_no_gradient: called before each operation of whose result autograd computes no gradient; None for nothing.
    """

    def __init__(self, device: torch.device, on_no_gradient: Callable[[], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._on_no_gradient = on_no_gradient
        self.drawn = ""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._on_no_gradient is not None and not torch.is_grad_enabled():
            self._on_no_gradient()
        if self.drawn or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = self._state()
        output = func(*args, **(kwargs or {}))  # attention has the tag even if it drops nothing
        if not torch.equal(before, self._state()):
            self.drawn = str(func)
        return output

    def _state(self) -> Tensor:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return torch.cat(states)


# The functions below take the randomness, then the arguments of torch's function. They return None if nothing is drawn
# or if torch's own function must be called.


def _dropout(
    randomness: dict[str, int], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    if not training or not 0 < p <= 1:
        return None
    dropped = keyed_dropout(input, p, seed=randomness["seed"], place=randomness["place"])
    return input.copy_(dropped) if inplace else dropped


def _torch_dropout(randomness: dict[str, int], input: Tensor, p: float, train: bool) -> Tensor | None:
    return _dropout(randomness, input, p, train)


def _attention(
    randomness: dict[str, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if dropout_p == 0.0:
        return None
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(shared, dim=-3), value.repeat_interleave(shared, dim=-3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights, by_head = softmax_of(scores), scores.dim() == 4
    seed, place = randomness["seed"], randomness["place"]
    return keyed_dropout(weights, dropout_p, seed=seed, place=place, attention=by_head) @ value


def _rand(randomness: dict[str, int], *size: Any, **how: Any) -> Tensor:
    return _fill(torch.empty(*size, **how), randomness)


def _rand_like(randomness: dict[str, int], input: Tensor, **how: Any) -> Tensor:
    return _fill(torch.empty_like(input, **how), randomness)


def _bernoulli_(randomness: dict[str, int], self: Tensor, p: float | Tensor = 0.5, **_: object) -> Tensor:
    return self.copy_(keyed_uniform(self.shape, torch.float32, self.device, **randomness) < p)


def _bernoulli(randomness: dict[str, int], input: Tensor, p: float | None = None, **_: object) -> Tensor:
    uniform = keyed_uniform(input.shape, torch.float32, input.device, **randomness)
    return (uniform < (input if p is None else p)).to(input.dtype)


def _fill(empty: Tensor, randomness: dict[str, int]) -> Tensor:
    with torch.no_grad():
        return empty.copy_(keyed_uniform(empty.shape, empty.dtype, empty.device, **randomness))


_OURS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    functional.dropout: _dropout,
    torch.dropout: _torch_dropout,
    functional.scaled_dot_product_attention: _attention,
    torch.rand: _rand,
    torch.rand_like: _rand_like,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
}
