"""Tables of the `datasets` library that a program passes as they are."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers

from pipetransformer import Training, load_model, train
from pipetransformer.data import DataInfo, Dataset, Task, lengths_of, own_dataset, read_batch
from pipetransformer_contract.spec import Model
from tests.testkit.hub import pictures, reviews, save_tokenizer, small_options


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "tokenizer"))


def own(data: Any, processor: Any = None, task: Task | None = None) -> Dataset:
    return own_dataset(data, dtype=torch.float64, processor=processor, task=task)


def test_a_tokenized_table_is_padded_with_its_classes_and_their_names(tokenizer: Any) -> None:
    texts = ["good", "bad film", "fine"]
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["n", "y"])})
    table = datasets.Dataset.from_dict({"text": texts, "label": [1, 0, 1]}, features=features)
    table = table.map(lambda rows: tokenizer(rows["text"]), batched=True)

    dataset = own((table, table.select([1])), tokenizer)

    assert dataset.info == DataInfo((4,), 2, 11, task=Task.CLASS, labels=("n", "y"), pad_id=0)
    assert dataset.processor is tokenizer
    inputs, targets = dataset.train.batch([1, 0])
    assert inputs.tolist() == [[2, 6, 9, 3], [2, 5, 3, 0]] and targets.tolist() == [0, 1]
    lengths = lengths_of(dataset.train, [1, 0], torch.device("cpu"))
    assert lengths is not None and lengths.tolist() == [4, 3]


def test_rows_that_a_tokenizer_has_padded_are_as_long_as_their_mask(tokenizer: Any) -> None:
    table = datasets.Dataset.from_dict(dict(tokenizer(["good", "bad film"], padding=True))).add_column("label", [0, 1])
    shuffled = table.select([1, 0])
    lengths = lengths_of(own(shuffled, tokenizer).train, [0, 1], torch.device("cpu"))
    assert lengths is not None and lengths.tolist() == [4, 3]
    assert len(own(shuffled, tokenizer).test) == 0


def test_tokens_alone_ask_for_the_next_one_and_labels_may_be_their_copy() -> None:
    rows = {"input_ids": [[1, 2, 3], [4, 5, 6]]}
    for columns in (rows, {**rows, "labels": rows["input_ids"]}):
        dataset = own(datasets.Dataset.from_dict(columns), task=Task.NEXT_TOKEN)
        assert dataset.info == DataInfo((3,), 7, 7, task=Task.NEXT_TOKEN)
        inputs, targets = dataset.train.batch([1])
        assert inputs.tolist() == [[4, 5, 6]] and targets.tolist() == [[5, 6, -100]]


def test_tokens_are_masked_for_a_model_that_finds_them(tokenizer: Any) -> None:
    table = datasets.Dataset.from_dict({"input_ids": [[2, *[5, 6, 7] * 10, 3]] * 20})
    dataset = own(table, tokenizer, Task.MASKED_TOKEN)
    inputs, targets = read_batch(dataset.train, range(20), 1)
    chosen = targets != -100
    assert 0.05 < chosen.double().mean() < 0.3 and (inputs[chosen] == 4).any()
    assert set(targets[chosen].tolist()) == {5, 6, 7}


def test_pictures_are_scaled_and_a_transform_of_the_programs_is_taken_as_it_is() -> None:
    table = pictures(4)
    scaled = own(table)
    assert scaled.info == DataInfo((3, 8, 8), 2, task=Task.CLASS, labels=("cat", "dog"))
    wanted = torch.from_numpy(np.array(table[2]["image"])).permute(2, 0, 1).double() / 127.5 - 1
    torch.testing.assert_close(scaled.train.batch([2])[0][0], wanted)

    def halves(rows: dict[str, Any]) -> dict[str, Any]:
        pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 / 2 for image in rows["image"]]
        return {"pixel_values": pixels, "label": rows["label"]}

    made = own(table.with_transform(halves))
    assert made.info == DataInfo((3, 8, 8), 2, labels=("cat", "dog"))
    inputs, targets = made.train.batch([3, 2])
    assert inputs.dtype == torch.float64 and targets.tolist() == [1, 0]
    torch.testing.assert_close(inputs[1], (wanted + 1) / 4, rtol=1e-6, atol=1e-6)


def test_pictures_whose_classes_are_texts_are_read_from_where_they_lie() -> None:
    table = pictures(4).remove_columns("label").add_column("label", ["dog", "cat", "dog", "eel"])
    dataset = own((table, table.select([3])))
    assert dataset.info.labels == ("cat", "dog", "eel")
    assert dataset.train.batch([0, 1, 3])[1].tolist() == [1, 0, 2] and dataset.test.batch([0])[1].tolist() == [2]
    torch.testing.assert_close(dataset.train.batch([3])[0], dataset.test.batch([0])[0])


def test_a_column_of_numbers_is_the_input_in_whatever_format_the_table_is() -> None:
    columns = {"x": [[[1.0, 2.0]], [[3.0, 4.0]]], "label": ["yes", "no"]}
    for kind in (None, "torch", "numpy"):
        dataset = own(datasets.Dataset.from_dict(columns).with_format(kind))
        assert dataset.info == DataInfo((1, 2), 2, labels=("no", "yes"))
        inputs, targets = dataset.train.batch([1])
        assert inputs.tolist() == [[[3.0, 4.0]]] and inputs.dtype == torch.float64 and targets.tolist() == [0]
    numbers = datasets.Dataset.from_dict({"x": [1.0, 2.0], "label": [0.5, 1.5]})
    assert own(numbers).info == DataInfo((), 0) and own(numbers).train.batch([1])[1].tolist() == [1.5]


def test_a_program_trains_on_its_table_and_leaves_a_model_that_reads_texts(tokenizer: Any, tmp_path: Path) -> None:
    table = reviews().map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
    train(
        model=Model(name="huggingface", num_layers=2, options=small_options("distilbert")),
        data=datasets.DatasetDict({"train": table, "validation": table.select(range(8))}),
        processor=tokenizer,
        training=Training(steps=2, global_batch_size=8),
        run_dir=tmp_path / "run",
    )
    found = transformers.pipeline("text-classification", str(tmp_path / "run" / "model"))("good film")
    assert found[0]["label"] in ("negative", "positive")
    assert load_model(tmp_path / "run" / "model").config.num_labels == 2
