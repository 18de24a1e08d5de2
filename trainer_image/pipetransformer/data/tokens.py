"""Text as tokens of one static shape: packed without padding, or padded at the end.

Tokens are bytes unless a tokenizer says otherwise, so nothing has to be downloaded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .dataset import Split, TensorSplit

PAD, START, END = 0, 1, 2
#: Id of byte 0.
BYTE_OFFSET = 3
#: Token ids of `encode_bytes`.
VOCABULARY = 256 + BYTE_OFFSET
#: Vocabulary sizes of byte samples: without and with a mask token.
BYTE_VOCABULARIES = (VOCABULARY, VOCABULARY + 1)

#: Maps a text to token ids, including those of its start and end.
Encode = Callable[[str], Sequence[int]]


def encode_bytes(text: str) -> list[int]:
    """UTF-8 bytes between a start and an end token."""
    return [START, *(byte + BYTE_OFFSET for byte in text.encode()), END]


@dataclass(frozen=True)
class PaddedTokens:
    """A split of padded samples in memory.

    Attributes:
        inputs: (samples, positions) ids.
        targets: (samples,) classes.
        positions_used: (samples,) number of positions that are not padding.
    """

    inputs: Tensor
    targets: Tensor
    positions_used: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(list(ids), dtype=torch.long)
        return self.inputs[index], self.targets[index]

    def lengths(self, ids: Sequence[int]) -> Tensor:
        return self.positions_used[torch.as_tensor(list(ids), dtype=torch.long)]


def as_lengths(length: int | Sequence[int]) -> tuple[int, ...]:
    """The lengths in a dataset's option `length`, ascending.

    Raises:
        ValueError: there are none, or one is not a positive number.
    """
    lengths = (length,) if isinstance(length, int) else tuple(sorted(set(length)))
    if not lengths or not all(isinstance(each, int) and each > 0 for each in lengths):
        raise ValueError(f"length is {length}: it must be a positive number of tokens, or a list of them")
    return lengths


def pack(texts: Iterable[str], length: int, encode: Encode) -> Split:
    """All texts joined and cut into samples of `length` tokens, whose targets are the next tokens. The rest at the end
    is dropped.

    Raises:
        ValueError: the texts do not fill one sample.
    """
    tokens: NDArray[np.int64] = np.fromiter(chain.from_iterable(map(encode, texts)), dtype=np.int64)
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(f"{len(tokens)} tokens do not fill one sample of {length}")
    rows = torch.from_numpy(tokens[: count * length + 1])
    return TensorSplit(rows[:-1].view(count, length), rows[1:].view(count, length))


def pad(texts: Sequence[tuple[str, int]], length: int, encode: Encode) -> Split:
    """One sample for each (text, class), cut or padded to `length` tokens.

    Raises:
        ValueError: there are no texts.
    """
    if not texts:
        raise ValueError("there are no texts")
    inputs = torch.full((len(texts), length), PAD, dtype=torch.long)
    lengths = torch.empty(len(texts), dtype=torch.long)
    for row, (text, _) in enumerate(texts):
        ids = torch.as_tensor(encode(text)[:length], dtype=torch.long)
        inputs[row, : len(ids)] = ids
        lengths[row] = max(1, len(ids))
    return PaddedTokens(inputs, torch.tensor([label for _, label in texts]), lengths)
