"""Datasets of the Hugging Face library, made here: nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from pipetransformer.data import DataInfo, Dataset, lengths_of, load_dataset
from pipetransformer.errors import SpecError
from pipetransformer_contract.spec import Data


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A folder of lines as `datasets.load_dataset` reads it."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for split, count in (("train", 40), ("test", 8)):
        lines = [json.dumps({"body": "word " * (i % 5 + 1), "kind": i % 3}) for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return str(folder)


def test_texts_of_hugging_face_are_padded_with_their_classes(rows: str) -> None:
    options = {"text": "body", "label": "kind", "length": 12}
    dataset = load_dataset(Data(name="huggingface", path=rows, options=options), dtype=torch.float32)
    assert dataset.info == DataInfo((12,), 3, 259)
    inputs, targets = dataset.train.batch([4, 0])
    assert inputs.shape == (2, 12)
    assert targets.tolist() == [1, 0]
    lengths = lengths_of(dataset.train, [4, 0], torch.device("cpu"))
    assert lengths is not None
    assert lengths.tolist() == [12, 7]
    assert inputs[1].tolist() == [1, *(byte + 3 for byte in b"word "), 2, 0, 0, 0, 0, 0]


def test_texts_of_hugging_face_are_packed_with_a_tokenizer(rows: str, tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tokenizer")
    options = {"text": "body", "tokenizer": str(tmp_path / "tokenizer"), "length": 7, "train": "train[:20]"}
    dataset = load_dataset(Data(name="huggingface", path=rows, options=options), dtype=torch.float32)
    assert dataset.info == DataInfo((7,), 2, 2)
    assert len(dataset.train) == (20 * 3 - 1) // 7
    assert dataset.train.batch([0])[1].tolist() == [[0] * 7]


def save_tokenizer(folder: Path) -> str:
    """Of three words, between [CLS] and [SEP]."""
    ids = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"))}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "cls_token", "sep_token", "mask_token")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", **names).save_pretrained(folder)
    return str(folder)


def save_rows(folder: Path, **columns: list[Any]) -> str:
    """A saved dataset whose two splits are alike."""
    table = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(folder))
    return str(folder)


def load(path: str, **options: Any) -> Dataset:
    return load_dataset(Data(name="huggingface", path=path, options=options), dtype=torch.float32)


def test_a_text_that_is_cut_keeps_what_marks_its_end(tmp_path: Path) -> None:
    path = save_rows(tmp_path / "saved", text=["a b c", "c"], label=[0, 1])
    options = {"text": "text", "label": "label", "length": 4, "tokenizer": save_tokenizer(tmp_path / "tokenizer")}
    dataset = load(path, **options)
    assert dataset.train.batch([0, 1])[0].tolist() == [[2, 5, 6, 3], [2, 7, 3, 0]]

    made = sorted(tmp_path.rglob("cache-*.arrow"))
    load(path, **options)
    assert sorted(tmp_path.rglob("cache-*.arrow")) == made, "another worker finds what the first has made"


def test_images_of_hugging_face_are_scaled(tmp_path: Path) -> None:
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    pixels[..., 0] = 255
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["a", "b"])})
    table = datasets.Dataset.from_dict({"picture": [pixels] * 3, "kind": [0, 1, 1]}, features=features)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "saved"))
    options = {"image": "picture", "label": "kind"}
    dataset = load_dataset(Data(name="huggingface", path=str(tmp_path / "saved"), options=options), dtype=torch.float64)
    assert dataset.info == DataInfo((3, 4, 6), 2)
    inputs, targets = dataset.train.batch([2, 0])
    assert targets.tolist() == [1, 0]
    assert inputs.dtype == torch.float64
    assert inputs[0, :, 0, 0].tolist() == [1, -1, -1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "need text"),
        ({"text": "body", "image": "picture", "label": "kind"}, "need text"),
        ({"image": "body"}, "need text"),
        ({"text": "bodies"}, "no column bodies among body, kind"),
        ({"text": "body", "length": 10**6}, "do not fill one sample"),
        ({"text": "body", "test": "validation"}, "validation"),
    ],
)
def test_options_that_do_not_fit_say_why(rows: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        load_dataset(Data(name="huggingface", path=rows, options=options), dtype=torch.float32)
    assert caught.value.field == "spec.data.path"
