"""What would come from the hub, made here: tokenizers, datasets and small models of transformers."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tokenizers
import transformers

WORDS = ("good", "bad", "fine", "poor", "film", "book")
SMALL = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}


def save_tokenizer(folder: Path) -> str:
    """Of a few words, between [CLS] and [SEP]; ids follow the order of `special`, then of `WORDS`."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    ids = {word: number for number, word in enumerate((*special, *WORDS))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "cls_token", "sep_token", "mask_token")}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", model_input_names=["input_ids", "attention_mask"], **names
    ).save_pretrained(folder)
    return str(folder)


def reviews(count: int = 24) -> datasets.Dataset:
    """Texts of a few words, with the classes `negative` and `positive`."""
    good = [f"{('bad', 'poor', 'good', 'fine')[i % 4]} {('film', 'book')[i % 2]}" for i in range(count)]
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
    )
    return datasets.Dataset.from_dict({"text": good, "label": [i % 4 // 2 for i in range(count)]}, features=features)


def pictures(count: int = 16, size: int = 8) -> datasets.Dataset:
    """Pictures in colour, with the classes `cat` and `dog`."""
    generator = np.random.default_rng(0)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    pixels = [generator.integers(0, 256, (size, size, 3), dtype=np.uint8) for _ in range(count)]
    return datasets.Dataset.from_dict({"image": pixels, "label": [i % 2 for i in range(count)]}, features=features)


def save_splits(folder: Path, table: datasets.Dataset) -> str:
    """A saved dataset whose two splits are alike."""
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(folder))
    return str(folder)


def small_options(model_type: str, **others: Any) -> dict[str, Any]:
    """Of a small configuration."""
    named = {
        "gpt2": {"n_embd": 16, "n_head": 2},
        "distilbert": {"dim": 16, "n_heads": 2, "hidden_dim": 32},
    }
    return {"model_type": model_type, **named.get(model_type, SMALL), **others}
