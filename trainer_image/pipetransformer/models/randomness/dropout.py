"""Keyed dropout: the mask follows from a key, not from the random state of the process.

The key is (seed, step, sample, place). A place is a spot in the model that draws, such as one dropout module. So a run
that moves layers and samples between workers drops the same elements as a run that does not. Workers exchange no random
state.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipetransformer.device_copies import to_device
from pipetransformer.models.context import current_micro_batch

#: SplitMix64's constants as signed 64-bit integers.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))

#: Bits of precision of the types that have fewer than float32.
_DIGITS = {torch.bfloat16: 8, torch.float16: 11}

#: Called before each draw.
watchers: list[Callable[[], None]] = []


class SamplesFirstError(ValueError):
    """A tensor of random draws does not have samples in its first dimension."""


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on all `parts`."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def keyed_dropout(x: Tensor, p: float, *, seed: int, place: int, attention: bool = False) -> Tensor:
    """Zero elements of `x` with probability `p` and scale the rest by 1/(1-p), with a mask for each sample.

    The step and the samples come from the micro-batch's context. A place that draws several times in one forward gets
    a different mask each time. In a slice of tokens, the same elements are dropped as in whole samples.

    Args:
        x: (micro-batch, ...) or (micro-batch x n, ...) with the n rows of each sample together, such as its windows. In
            a slice of tokens: (micro-batch, positions, ...).
        p: probability of dropping an element.
        seed: the job's seed.
        place: number of the place that draws, unique in the model.
        attention: whether `x` is (micro-batch, heads, queries, keys) instead. In whole samples there are as many keys
            as queries.

    Raises:
        ValueError: in a slice of tokens, `x` has another shape.
        SamplesFirstError: `x` has another shape, such as (positions, micro-batch, ...). It is not raised if the number
            of positions is a multiple of the micro-batch. So `warm_up` tries another size.
    """
    keys = _keys(x.shape, x.device, "dropout", seed=seed, place=place)
    if p == 1.0:
        return x * 0.0  # as torch does
    bits = _bits(keys, x.shape, "dropout", attention=attention)
    return x * (bits >= int(p * 2**32) - 2**31) / (1.0 - p)


def softmax_of(scores: Tensor) -> Tensor:
    """Attention weights: the softmax over the last dimension of scores, which are -inf where a key is hidden. A query
    from which all keys are hidden gets weights of 0, as in torch's `scaled_dot_product_attention`, and not NaN."""
    hidden = (scores == -math.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(hidden, 0.0).softmax(dim=-1).masked_fill(hidden, 0.0)


def keyed_uniform(shape: torch.Size, dtype: torch.dtype, device: torch.device, *, seed: int, place: int) -> Tensor:
    """Uniform random numbers in [0, 1). They follow from the same key as the masks of `keyed_dropout`, and may have the
    same shapes."""
    keys = _keys(shape, device, "random numbers", seed=seed, place=place)
    bits = _bits(keys, shape, "random numbers", attention=False)
    digits = _DIGITS.get(dtype, 24)
    return ((bits >> (32 - digits)) & ((1 << digits) - 1)).to(dtype) * 2.0**-digits


def _keys(shape: torch.Size, device: torch.device, what: str, *, seed: int, place: int) -> Tensor:
    """(micro-batch,) the key of each sample for the next draw at this place. Counts the draw.

    Samples are hashed and copied to the device once a micro-batch. A copy in each draw would make the device wait.
    """
    for tell in watchers:
        tell()
    context = current_micro_batch()
    samples = len(context.sample_ids)
    if not shape or shape[0] % samples:
        raise SamplesFirstError(
            f"{what} of shape {tuple(shape)} in a micro-batch of {samples} samples, but samples must come first: use "
            f"({samples}, ...), as with batch_first=True, or ({samples} x n, ...)"
        )
    draw = context.draws.get(place, 0)
    context.draws[place] = draw + 1
    keys = context.sample_keys.get((seed, device))
    if keys is None:
        hashed = [derive_seed(seed, context.step, sample_id) for sample_id in context.sample_ids]
        keys = context.sample_keys[seed, device] = to_device(torch.tensor(hashed), device)
    return _mix(keys + derive_seed(place, draw))


def _bits(keys: Tensor, shape: torch.Size, what: str, *, attention: bool) -> Tensor:
    """Random 32-bit integers for a tensor of this shape. In a slice of tokens an element gets the same integer as in
    whole samples.

    Raises:
        ValueError: in a slice of tokens, the shape does not have the positions where `keyed_dropout` says.
    """
    device, tokens = keys.device, current_micro_batch().tokens
    if tokens is None:
        return _random_bits(keys, shape.numel() // len(keys)).reshape(shape)
    samples, length = len(keys), len(tokens)
    if attention and shape[0] == samples and tuple(shape[2:]) == (length, tokens.stop):
        rows = torch.arange(shape[1], device=device)[:, None] * tokens.total
        rows = rows + torch.arange(tokens.start, tokens.stop, device=device)
        return _random_runs(keys, rows.flatten() * tokens.total, tokens.stop).reshape(shape)
    if attention or shape[0] != samples or shape[1:2] != (length,):
        wanted = f"({samples}, heads, {length}, {tokens.stop})" if attention else f"({samples}, {length}, ...)"
        raise ValueError(f"{what} of shape {tuple(shape)} in a slice of {length} tokens must have the shape {wanted}")
    of_sample = shape[1:].numel()
    first = torch.full((1,), tokens.start * (of_sample // length), device=device)
    return _random_runs(keys, first, of_sample).reshape(shape)


def _random_runs(keys: Tensor, first: Tensor, count: int) -> Tensor:
    """(keys, runs, count) parts of the sequences of `_random_bits`: for each key, the `count` integers from each index
    in `first` (runs,) on.

    SplitMix64 makes two integers at a time, so a run may begin with the second one.
    """
    states = keys[:, None] + (first >> 1) * _STRIDE
    bits = _random_bits(states.flatten(), count + 1).reshape(*states.shape, count + 1)
    return torch.where((first & 1)[:, None].bool(), bits[..., 1:], bits[..., :-1])


def _random_bits(keys: Tensor, count: int) -> Tensor:
    """(len(keys), count) random 32-bit integers: the halves of SplitMix64's output for each key (Steele, Lea and Flood,
    2014).

    Integer arithmetic overflows in the same way on all devices, so all of them draw the same numbers.
    """
    z = torch.arange(1, -(-count // 2) + 1, device=keys.device).mul_(_STRIDE) + keys.unsqueeze(1)
    return _mix(z).view(torch.int32)[:, :count]


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's mix of each integer, in place."""
    for shift, factor in _MIX:
        z ^= (z >> shift) & ((1 << (64 - shift)) - 1)  # a logical shift: the type is signed
        z *= factor
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z


class KeyedDropout(nn.Module):
    """A dropout module: `keyed_dropout` in training, the identity in evaluation.

    Args:
        p: probability of dropping an element.
        seed: the job's seed.
        place: number of the place that draws, unique in the model.
    """

    def __init__(self, p: float, *, seed: int, place: int) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return keyed_dropout(x, self.p, seed=self.seed, place=self.place)
