"""Saves the trainer's byte tokenizer and its scaling of pictures in the formats of transformers.

So transformers makes the same inputs for a finished model as the trainer did. A tokenizer of transformers saves itself.
"""

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .tokens import BYTE_OFFSET, END, PAD, START, VOCABULARY

logger = logging.getLogger(__name__)

#: How transformers resizes pictures of another size: PIL's number for bilinear.
_BILINEAR = 2


@dataclass(frozen=True)
class ByteTokenizer:
    """Saves `encode_bytes` as a tokenizer of transformers.

    Attributes:
        length: number of tokens in the longest sample.
        ends: whether an end token follows a text. False for a model that continues texts.
        masks: whether the vocabulary has a mask token, so that a text may contain `<mask>`.
    """

    length: int
    ends: bool = True
    masks: bool = False

    def save_pretrained(self, save_directory: str) -> None:
        """Without transformers, which alone reads the tokenizer, this only logs a warning."""
        try:
            import tokenizers
            from transformers import PreTrainedTokenizerFast
            from transformers.convert_slow_tokenizer import bytes_to_unicode
        except ImportError as error:
            logger.warning("the model is saved without its tokenizer of bytes, which needs transformers: %s", error)
            return

        ids = {"<pad>": PAD, "<s>": START, "</s>": END}
        ids |= {character: byte + BYTE_OFFSET for byte, character in bytes_to_unicode().items()}
        if self.masks:
            ids["<mask>"] = VOCABULARY
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=[]))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>" if self.ends else "<s> $A", special_tokens=[("<s>", START), ("</s>", END)]
        )
        names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
        PreTrainedTokenizerFast(
            tokenizer_object=made,
            model_max_length=self.length,
            model_input_names=["input_ids", "attention_mask"],
            split_special_tokens=not self.masks,  # "</s>" in a text is read as four bytes, not as the end token
            **names | ({"mask_token": "<mask>"} if self.masks else {}),
        ).save_pretrained(save_directory)


@dataclass(frozen=True)
class PictureScaling:
    """Saves the scaling of pictures to [-1, 1] as an image processor of transformers, which also resizes.

    Attributes:
        shape: (channels, height, width) of a sample.
        largest: pixel value that becomes 1.
    """

    shape: tuple[int, ...]
    largest: float

    def is_that_of(self, processor: Any) -> bool:
        """Whether an image processor of transformers makes the same inputs from pictures of this size."""
        mean, std = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
        steps = ("do_rescale", "do_normalize")
        if mean is None or std is None or not all(getattr(processor, step, False) for step in steps):
            return False
        size = getattr(processor, "size", None) if getattr(processor, "do_resize", False) else None
        return (
            np.allclose([*np.ravel(mean), *np.ravel(std)], 0.5)
            and math.isclose(processor.rescale_factor, 1 / self.largest)
            and not getattr(processor, "do_center_crop", False)
            and (size is None or (size.get("height"), size.get("width")) == self.shape[1:])
        )

    def save_pretrained(self, save_directory: str) -> None:
        channels, height, width = self.shape
        said = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": height, "width": width},
            "resample": _BILINEAR,
            "do_rescale": True,
            "rescale_factor": 1 / self.largest,
            "do_normalize": True,
            "image_mean": [0.5] * channels,
            "image_std": [0.5] * channels,
        }
        (Path(save_directory) / "preprocessor_config.json").write_text(json.dumps(said, indent=2))
