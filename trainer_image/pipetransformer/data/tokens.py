"""Turns texts into samples of tokens with one shape: joined and cut without padding, or each padded at the end.

By default tokens are bytes, so that no tokenizer has to be downloaded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .dataset import Split, TensorSplit

PAD, START, END = 0, 1, 2
#: Token id of the byte 0. The smaller ids are PAD, START and END.
BYTE_OFFSET = 3
#: Number of token ids that `encode_bytes` uses.
VOCABULARY = 256 + BYTE_OFFSET
#: Vocabulary sizes of samples of bytes: without a mask token, and with one.
BYTE_VOCABULARIES = (VOCABULARY, VOCABULARY + 1)

#: Maps a text to token ids, including those of its start and end.
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of a tokenizer's special tokens; None for a token that it lacks.

    Attributes:
        pad: id of padding.
        start: id at the start of a text.
        end: id at the end of a text.
        mask: id of a masked token.
        never_masked: ids of all tokens that are never masked.
    """

    pad: int | None = None
    start: int | None = None
    end: int | None = None
    mask: int | None = None
    never_masked: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> "SpecialTokens":
        """The special tokens of a tokenizer of transformers."""
        return cls(
            tokenizer.pad_token_id,
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.mask_token_id,
            tuple(tokenizer.all_special_ids),
        )

    @property
    def padding(self) -> int:
        """The id that fills a sample up to its length. Without a padding token it may be any id, because the model
        ignores padded positions."""
        return PAD if self.pad is None else self.pad

    @property
    def in_info(self) -> dict[str, Any]:
        """The ids that `DataInfo` has, by its field names."""
        return {"pad_id": self.pad, "start_id": self.start, "end_id": self.end}


def encode_bytes(text: str) -> list[int]:
    """Token ids of a text: its UTF-8 bytes between a start token and an end token."""
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
    """The lengths in a dataset's option `length`, ascending and without duplicates.

    Raises:
        ValueError: the list is empty, or a length is not a positive number.
    """
    lengths = (length,) if isinstance(length, int) else tuple(sorted(set(length)))
    if not lengths or not all(isinstance(each, int) and each > 0 for each in lengths):
        raise ValueError(f"length is {length}: it must be a positive number of tokens, or a list of them")
    return lengths


def pack(texts: Iterable[str], length: int, encode: Encode) -> Split:
    """Join all texts and cut them into samples of `length` tokens. Targets are the next tokens. Tokens at the end that
    do not fill a sample are dropped.

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
    """Make one sample for each (text, class). Texts are cut or padded to `length` tokens.

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
