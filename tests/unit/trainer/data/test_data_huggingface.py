"""Datasets of the Hugging Face library, made here: nothing is downloaded."""

import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from pipetransformer.data import DataInfo, Dataset, Task, lengths_of, load_dataset, read_batch
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
    assert dataset.info == DataInfo((12,), 3, 259, task=Task.CLASS, pad_id=0, start_id=1, end_id=2)
    inputs, targets = dataset.train.batch([4, 0])
    assert inputs.shape == (2, 12)
    assert targets.tolist() == [1, 0]
    lengths = lengths_of(dataset.train, [4, 0], torch.device("cpu"))
    assert lengths is not None
    assert lengths.tolist() == [12, 7]
    assert inputs[1].tolist() == [1, *(byte + 3 for byte in b"word "), 2, 0, 0, 0, 0, 0]


def test_lengths_are_read_without_selecting_columns(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the library longer the larger the table is, and each micro-batch asks."""
    train = load(rows, text="body", label="kind", length=12).train
    monkeypatch.setattr(datasets.Dataset, "select_columns", None)
    lengths = lengths_of(train, [4, 0], torch.device("cpu"))
    assert lengths is not None and lengths.tolist() == [12, 7]


def test_texts_of_hugging_face_are_packed_with_a_tokenizer(rows: str, tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tokenizer")
    options = {"text": "body", "tokenizer": str(tmp_path / "tokenizer"), "length": 7, "train": "train[:20]"}
    dataset = load_dataset(Data(name="huggingface", path=rows, options=options), dtype=torch.float32)
    assert dataset.info == DataInfo((7,), 2, 2, task=Task.NEXT_TOKEN)
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


@pytest.mark.parametrize("task", [Task.NEXT_TOKEN, Task.MASKED_TOKEN])
def test_packed_texts_go_to_loader_processes_as_the_names_of_files(task: Task, tmp_path: Path) -> None:
    """Their tokens are mapped into memory. Each process would hold a copy of them otherwise."""
    path = save_rows(tmp_path / "saved", text=["a long text " * 1000] * 5)
    train = load(path, text="text", length=32, task=str(task)).train

    sent = pickle.dumps(train)

    assert len(sent) < 5000 < 4 * len(train) * 32
    assert all(map(torch.equal, pickle.loads(sent).batch([7, 3]), train.batch([7, 3])))


def test_a_text_that_is_cut_keeps_what_marks_its_end(tmp_path: Path) -> None:
    path = save_rows(tmp_path / "saved", text=["a b c", "c"], label=[0, 1])
    options = {"text": "text", "label": "label", "length": 4, "tokenizer": save_tokenizer(tmp_path / "tokenizer")}
    dataset = load(path, **options)
    assert dataset.train.batch([0, 1])[0].tolist() == [[2, 5, 6, 3], [2, 7, 3, 0]]

    made = sorted(tmp_path.rglob("cache-*.arrow"))
    load(path, **options)
    assert sorted(tmp_path.rglob("cache-*.arrow")) == made, "another worker finds what the first has made"


def test_texts_are_packed_over_the_whole_split(tmp_path: Path) -> None:
    path = save_rows(tmp_path / "saved", text=["a"] * 1500)  # which the library reads 1,000 at a time
    train = load(path, text="text", length=2000).train
    assert len(train) == (1500 * 3 - 1) // 2000
    inputs, targets = train.batch([1, 0])
    assert inputs.tolist()[1] == ([1, 100, 2] * 667)[:2000] and targets.tolist()[1][-1] == inputs.tolist()[0][0]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_words_are_masked_by_the_tokenizers_own_token_and_its_other_tokens_never(tmp_path: Path) -> None:
    path = save_rows(tmp_path / "saved", text=["a b c a b c"] * 40)
    options = {"text": "text", "length": 16, "tokenizer": save_tokenizer(tmp_path / "tokenizer")}
    plain, dataset = load(path, **options), load(path, **options, task="MaskedToken")
    assert dataset.info == DataInfo((16,), 8, 8, task=Task.MASKED_TOKEN, pad_id=0)
    ids = range(len(dataset.train))
    tokens = plain.train.batch(ids)[0]
    inputs, targets = read_batch(dataset.train, ids, 3)
    chosen = targets != -100
    assert torch.equal(targets[chosen], tokens[chosen]) and torch.equal(inputs[~chosen], tokens[~chosen])
    assert set(targets[chosen].tolist()) == {5, 6, 7}, "no [CLS] and no [SEP]"
    assert 0.6 < (inputs[chosen] == 4).double().mean() < 0.95
    assert torch.equal(read_batch(dataset.train, [7, 2], 3)[0], inputs[[7, 2]])


def test_a_saved_table_is_sliced_as_one_of_the_hub(tmp_path: Path) -> None:
    rows: dict[str, list[Any]] = {"text": [str(number) for number in range(10)], "label": [0, 1] * 5}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "one"))
    splits = {"train": "train[:80%]", "test": "train[80%:]"}
    for path in (str(tmp_path / "one"), save_rows(tmp_path / "two", **rows)):
        dataset = load(path, text="text", label="label", length=4, **splits)
        assert (len(dataset.train), len(dataset.test)) == (8, 2)
        assert dataset.test.batch([1])[0].tolist() == [[1, ord("9") + 3, 2, 0]]


def test_a_table_in_a_folder_that_is_not_ours_is_mapped_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_rows(tmp_path / "saved", text=["a b c"] * 40)
    monkeypatch.setattr("os.access", lambda folder, mode: not Path(folder).is_relative_to(path))
    before, made = set(Path(path).rglob("*")), []
    for _ in range(2):
        assert len(load(path, text="text", length=20).train) == (40 * 7 - 1) // 20
        made.append(sorted((tmp_path / "cache").rglob("cache-*.arrow")))
    assert set(Path(path).rglob("*")) == before
    assert len(made[0]) == 1 and made[0] == made[1]


def test_labels_may_be_true_or_false(tmp_path: Path) -> None:
    dataset = load(save_rows(tmp_path / "saved", text=["a", "b"], label=[True, False]), text="text", label="label")
    assert dataset.info.num_classes == 2
    assert dataset.train.batch([0, 1])[1].tolist() == [1, 0] and dataset.train.batch([0])[1].dtype == torch.int64


def test_labels_may_be_texts_that_are_numbered_alike_in_both_splits(tmp_path: Path) -> None:
    splits = {"train": ["poor", "bad", "good"], "test": ["bad", "fine", "bad"]}
    tables = {name: datasets.Dataset.from_dict({"text": ["a"] * 3, "label": labels}) for name, labels in splits.items()}
    datasets.DatasetDict(tables).save_to_disk(str(tmp_path / "saved"))
    dataset = load(str(tmp_path / "saved"), text="text", label="label", length=4)
    assert (dataset.info.num_classes, dataset.info.labels) == (4, ("bad", "fine", "good", "poor"))
    assert dataset.train.batch([0, 1, 2])[1].tolist() == [3, 0, 2]
    assert dataset.test.batch([0, 1])[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": [0, 1, -1]}, "column label: row 2 of the training split is -1, which is not a class"),
        ({"label": [0, None, 1]}, "column label: row 1 of the training split is None, which is not a class"),
        ({"label": [0.0, 1.0, 1.0]}, "column label holds double, not classes"),
        ({"label": ["good", None, "bad"]}, "column label: row 1 of the training split is None, which is not a class"),
        ({"text": ["a", None, "b"]}, "column text: row 1 of the training split is None, which is not a text"),
        ({"text": [["a"], ["b"], ["c"]]}, "column text holds list.* not texts"),
    ],
)
def test_columns_that_hold_something_else_are_named(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save_rows(tmp_path / "saved", **{"text": ["a", "b", "c"], "label": [0, 1, 0], **columns})
    with pytest.raises(SpecError, match=message):
        load(path, text="text", label="label")


def test_a_held_out_row_without_a_class_is_named_with_its_split(tmp_path: Path) -> None:
    """Public datasets often hide the classes of their test split, as -1."""
    tables = {
        split: datasets.Dataset.from_dict({"text": ["a"], "label": [label]})
        for split, label in (("train", 0), ("test", -1))
    }
    datasets.DatasetDict(tables).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(SpecError, match="column label: row 0 of the held-out split is -1, which is not a class"):
        load(str(tmp_path / "saved"), text="text", label="label")


def test_images_of_hugging_face_are_scaled(tmp_path: Path) -> None:
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    pixels[..., 0] = 255
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["a", "b"])})
    table = datasets.Dataset.from_dict({"picture": [pixels] * 3, "kind": [0, 1, 1]}, features=features)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "saved"))
    options = {"image": "picture", "label": "kind"}
    dataset = load_dataset(Data(name="huggingface", path=str(tmp_path / "saved"), options=options), dtype=torch.float64)
    assert dataset.info == DataInfo((3, 4, 6), 2, task=Task.CLASS, labels=("a", "b"))
    inputs, targets = dataset.train.batch([2, 0])
    assert targets.tolist() == [1, 0]
    assert inputs.dtype == torch.float64
    assert inputs[0, :, 0, 0].tolist() == [1, -1, -1]


def test_arrays_are_images_if_their_pixels_are_bytes(tmp_path: Path) -> None:
    pixels: Any = [[[0, 255], [51, 102]]] * 2
    images = load(save_rows(tmp_path / "bytes", picture=pixels, kind=[0, 1]), image="picture", label="kind")
    assert images.info.input_shape == (1, 2, 2)
    torch.testing.assert_close(images.train.batch([1])[0][0, 0], torch.tensor([[-1, 1], [-0.6, -0.2]]))
    scaled = [[[value / 255 for value in row] for row in picture] for picture in pixels]
    with pytest.raises(SpecError, match="pixels of a picture are floating-point numbers: scale them to 0 to 255"):
        load(save_rows(tmp_path / "scaled", picture=scaled, kind=[0, 1]), image="picture", label="kind")


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({}, "options", "need text"),
        ({"text": "body", "image": "picture", "label": "kind"}, "options", "need text"),
        ({"image": "body"}, "options", "need text"),
        ({"text": "bodies"}, "options.text", "no column bodies .* among body, kind"),
        ({"text": "body", "length": 10**6}, "path", "do not fill one sample"),
        ({"text": "body", "test": "validation"}, "path", "validation"),
        ({"text": "body", "task": "Class"}, "options.task", "task Class is learnt with a column `label`"),
        (
            {"text": "body", "label": "kind", "task": "MaskedToken"},
            "options.task",
            "task MaskedToken is learnt without a column `label`",
        ),
        ({"text": "body", "task": "Words"}, "options.task", 'there is no task "Words"'),
    ],
)
def test_options_that_do_not_fit_say_why(rows: str, options: dict[str, object], field: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        load_dataset(Data(name="huggingface", path=rows, options=options), dtype=torch.float32)
    assert caught.value.field == f"spec.data.{field}"
