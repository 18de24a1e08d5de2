"""What a program passes by mistake is refused before any data are read, in words that say what to pass instead."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pipetransformer import SpecError, Training, train
from pipetransformer.data import load_dataset
from pipetransformer_contract.spec import Data, Model
from tests.testkit.hub import reviews, save_splits, save_tokenizer, small_options


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def small_model() -> list[nn.Module]:
    return [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)]


SAMPLES = TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.long))


def refusal(run_dir: Path, /, **parts: Any) -> str:
    said: dict[str, Any] = {"model": small_model, "data": (SAMPLES, SAMPLES), "training": Training(steps=1)}
    with pytest.raises(SpecError) as refused:
        train(run_dir=run_dir, **said | parts)
    return str(refused.value)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(SAMPLES)


def streamed() -> Any:
    return datasets.IterableDataset.from_generator(lambda: iter([{"text": "a", "label": 0}]))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Stream(), r"^data: is a Stream: samples of an IterableDataset have no numbers.*pass a map-style dataset"),
        ((Stream(), SAMPLES), "^data: samples of an IterableDataset have no numbers"),
        (streamed(), "^data: is an IterableDataset: samples .* load it with streaming=False"),
        (
            DataLoader(SAMPLES),
            r"^data: is a DataLoader: pass its dataset, `loader\.dataset`.*training.global_batch_size",
        ),
        ((DataLoader(SAMPLES), DataLoader(SAMPLES)), r"^data: pass its dataset, `loader\.dataset`"),
        (SAMPLES.tensors, r"^data: a tensor is not a dataset of \(input, target\): pass \(TensorDataset\("),
        (np.zeros((4, 4)), r"^data: is a ndarray: it has no targets: pass \(TensorDataset\("),
        (iter(SAMPLES), "^data: is an iterator: pass a Dataset, or one or two"),
        (datasets.DatasetDict({"test": reviews()}), r'^data: has the splits test: pass .* \(data\["train"\], '),
        (
            datasets.DatasetDict({"train": reviews(), "validation": reviews(), "test": reviews()}),
            r'has the splits train, validation, test: pass the two .* \(data\["train"\], data\["test"\]\)',
        ),
        (
            reviews(),
            r"^data: column text holds texts, not tokens: .*dataset\.map\(.*processor=token",
        ),
        (reviews().remove_columns("label"), "^data: has no column label or labels among text"),
        (
            datasets.Dataset.from_dict({"a": [1.0], "b": [2.0], "label": [0]}),
            r'^data: has the columns a, b, label: .* dataset\.select_columns\(\[\.\.\., "label"\]\)',
        ),
        (
            datasets.Dataset.from_dict({"input_ids": [[1, 2]], "token_type_ids": [[0, 1]], "label": [0]}),
            "token_type_ids marks a second text",
        ),
        (
            datasets.Dataset.from_dict({"input_ids": [[0, 2]], "attention_mask": [[0, 1]], "label": [0]}),
            "attention_mask: row 0 hides tokens before others: pad at the end",
        ),
        (
            datasets.Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[7, 8]]}),
            "labels: row 0 holds other tokens than",
        ),
    ],
)
def test_data_of_another_kind_are_refused_with_what_to_pass_instead(data: Any, words: str, tmp_path: Path) -> None:
    with mock.patch("pipetransformer.models.script_model.ScriptModel._build") as built:
        said = refusal(tmp_path, data=data)
    assert re.search(words, said), said
    assert not built.called


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            nn.Sequential(*small_model()),
            "model: is an nn.Module, Sequential.*: pass a function that returns it as a list",
        ),
        (small_model(), "model: is already built, .*: pass the function that builds it, because every worker calls it"),
        ("vit", r"model: is 'vit': pass Model\(name='vit', \.\.\.\)"),
        (lambda: nn.Linear(4, 2), r"model: the function must return .*, not Linear"),
        (lambda: [nn.Linear(4, 8), nn.Linear(8, 2)], r"model: the function must return .*, not a list of 2"),
        (lambda: [*small_model(), None], r"model: the function must return .*, not a list with a NoneType"),
    ],
)
def test_a_model_of_another_kind_is_refused_with_what_to_pass_instead(model: Any, words: str, tmp_path: Path) -> None:
    assert re.match(words, said := refusal(tmp_path, model=model)), said


def test_a_model_of_transformers_is_refused_with_how_to_pass_its_folder(tmp_path: Path) -> None:
    whole = transformers.BertForSequenceClassification(
        transformers.BertConfig(num_hidden_layers=1, vocab_size=11, hidden_size=8, num_attention_heads=2)
    )
    said = refusal(tmp_path, model=whole)
    assert 'save it by save_pretrained(FOLDER), and pass Model(name="huggingface", path=FOLDER' in said


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"modle": small_model}, 'modle: Unknown argument of train (did you mean "model"?)'),
        ({"learning_rate": 1e-3}, "learning_rate: Unknown argument of train. Known: model, data, "),
        ({"training": {"epoch": 3}}, 'training.epoch: there is no such field (did you mean "epochs"?)'),
        (
            {"training": {"steps": 1, "optimizer": {"learning_rat": 1}}},
            'training.optimizer.learning_rat: there is no such field (did you mean "learning_rate"?)',
        ),
        ({"checkpoint": {"location": "/x", "every_step": 1}}, 'there is no such field (did you mean "every_steps"?)'),
        (
            {"checkpoint": {"location": "s3:/bucket/run"}},
            "checkpoint.location: 's3:/bucket/run' has one slash after 's3:': write s3://...",
        ),
        ({"processor": "bert-base"}, "processor: must be a tokenizer or image processor of transformers, not 'bert"),
    ],
)
def test_a_misspelt_argument_is_told_what_may_have_been_meant(
    parts: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal(tmp_path, **parts)


def test_a_misspelt_field_of_a_type_of_the_spec_is_told_what_may_have_been_meant() -> None:
    misspelt: dict[str, Any] = {"epoch": 3}
    of_a_part = 'Training has no argument "learning_rate" (did you mean "optimizer=Optimizer(learning_rate=...)"?)'
    with pytest.raises(TypeError, match=re.escape(of_a_part)):
        Training(steps=1, learning_rate=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=re.escape('Training has no argument "epoch" (did you mean "epochs"?)')):
        Training(**misspelt)
    spelt_as_in_a_manifest: dict[str, Any] = {"globalBatchSize": 8}
    assert Training(**spelt_as_in_a_manifest).global_batch_size == 8


BERT = Model(name="huggingface", num_layers=1, options=small_options("bert"))


def spec_refusal(run_dir: Path, model: Model, data: Data) -> SpecError:
    """And no data were read for it."""
    with (
        mock.patch("pipetransformer.data.text.load_text") as text,
        mock.patch("pipetransformer.data.huggingface.read_tables") as tables,
        pytest.raises(SpecError) as refused,
    ):
        train(model=model, data=data, training=Training(steps=1), run_dir=run_dir)
    assert not text.called and not tables.called
    return refused.value


TEXTS = {"text": "text", "label": "label"}


@pytest.mark.parametrize(
    ("model", "data", "field", "words"),
    [
        (
            Model(name="huggingface", num_layers=1, options={"model_type": "electra"}),
            Data(name="huggingface", path="x", options=TEXTS),
            "spec.model.architecture",
            'Unsupported architecture "electra". Supported: BertForMaskedLM, .*register_architecture.*docs/models.md',
        ),
        (
            BERT.model_copy(update={"architecture": "BertForSequenceClasification"}),
            Data(name="huggingface", path="x", options=TEXTS),
            "spec.model.architecture",
            r'"BertForSequenceClasification" \(did you mean "BertForSequenceClassification"\?\)',
        ),
        (
            Model(name="huggingface", num_layers=1, options={"model_type": "brt"}),
            Data(name="huggingface", path="x", options=TEXTS),
            "spec.model.options.model_type",
            r'\'brt\' is not a model type of transformers \(did you mean "bert"\?\)',
        ),
        (
            Model(name="huggingface", num_layers=1, options=small_options("bert", hiden_size=3)),
            Data(name="huggingface", path="x", options=TEXTS),
            "spec.model.options.hiden_size",
            r'BertConfig has no hiden_size \(did you mean "hidden_size"\?\)',
        ),
        (
            BERT,
            Data(name="huggingface", path="x", options={**TEXTS, "tokeniser": "y"}),
            "spec.data.options.tokeniser",
            r'no option tokeniser \(did you mean "tokenizer"\?\): it takes name, train, ',
        ),
        (
            BERT,
            Data(name="text", options={"task": "Clas"}),
            "spec.data.options.task",
            r'no task "Clas" \(did you mean "Class"\?\): use NextToken, MaskedToken, Class',
        ),
        (
            BERT,
            Data(name="text"),
            "spec.data.options.task",
            "task is NextToken, but BertForSequence.* learns Class",
        ),
        (
            BERT,
            Data(name="huggingface", path="x", options={"text": "text"}),
            "spec.data.options.task",
            "is NextToken, but Bert",
        ),
        (
            BERT.model_copy(update={"hidden_size": 256}),
            Data(name="huggingface", path="x", options=TEXTS),
            "spec.model.hiddenSize",
            "only vit has hiddenSize: use options for another model",
        ),
        (
            Model(name="vit", options={"hidden_size": 256}),
            Data(name="text"),
            "spec.model.options",
            "are for other models: vit has fields, such as hiddenSize",
        ),
        (
            Model(name="mine.models:build", num_layers=1),
            Data(name="huggingface", path="x", options=TEXTS),
            "spec.model.name",
            "cannot import 'mine.models'",
        ),
    ],
)
def test_a_wrong_name_is_refused_before_data_are_read(
    model: Model, data: Data, field: str, words: str, tmp_path: Path
) -> None:
    refused = spec_refusal(tmp_path, model, data)
    assert refused.field == field
    assert re.search(words, str(refused)), str(refused)


def test_a_forgotten_tokenizer_is_noticed_before_texts_are_tokenized(tmp_path: Path) -> None:
    config = transformers.BertConfig(num_hidden_layers=1, vocab_size=1000, hidden_size=8, num_attention_heads=2)
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    model = Model(name="huggingface", path=str(tmp_path / "model"), num_layers=1)
    refused = spec_refusal(tmp_path / "run", model, Data(name="huggingface", path="x", options=TEXTS))
    assert refused.field == "spec.data.options.tokenizer" and "set its tokenizer" in str(refused)


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"text": "txt", "label": "label"}, "text", r'no column txt \(did you mean "text"\?\) among text, label'),
        ({"text": "text", "label": "class"}, "label", "no column class among text, label"),
        ({"image": "img", "label": "label"}, "image", "no column img among text, label"),
        ({"text": "text", "test": "tst"}, "test", r'no split "tst" \(did you mean "test"\?\), only train, test'),
        ({"text": "text", "tokenizer": "/no/such"}, "tokenizer", "/no/such cannot be read"),
        ({"text": "text", "task": "MaskedToken", "label": "label"}, "task", "is learnt without a column"),
    ],
)
def test_a_missing_column_split_or_tokenizer_names_its_option(
    options: dict[str, str], field: str, words: str, tmp_path: Path
) -> None:
    data = Data(name="huggingface", path=save_splits(tmp_path / "data", reviews()), options=options)
    with (
        mock.patch("pipetransformer.data.huggingface.mapped") as mapped,
        pytest.raises(SpecError, match=words) as refused,
    ):
        load_dataset(data, dtype=torch.float32)
    assert refused.value.field == f"spec.data.options.{field}"
    assert not mapped.called


def test_files_of_rows_are_read_as_they_lie_with_slices_as_splits(tmp_path: Path) -> None:
    table = reviews(20)
    table.to_csv(tmp_path / "rows.csv")
    table.to_csv(tmp_path / "rows.tsv", sep="\t")
    table.to_json(tmp_path / "rows.jsonl")
    table.to_parquet(tmp_path / "rows.parquet")
    options = {**TEXTS, "train": "train[:75%]", "test": "train[75%:]", "length": 5}
    options["tokenizer"] = save_tokenizer(tmp_path / "tokenizer")
    read = {
        name: load_dataset(Data(name="huggingface", path=str(tmp_path / name), options=options), dtype=torch.float32)
        for name in ("rows.csv", "rows.tsv", "rows.jsonl", "rows.parquet")
    }
    for dataset in read.values():
        assert (len(dataset.train), len(dataset.test)) == (15, 5)
        assert dataset.train.batch([3])[0].tolist() == [[2, 7, 10, 3, 0]]
    with pytest.raises(
        SpecError, match=r"options\.test: there is no split \"test\", only train: .*test: train\[90%:\]"
    ):
        load_dataset(Data(name="huggingface", path=str(tmp_path / "rows.csv"), options=TEXTS), dtype=torch.float32)
