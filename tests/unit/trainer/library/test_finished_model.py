"""What a finished run leaves: a folder that transformers' pipelines work on, or that `load_model` reads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import TensorDataset

import pipetransformer
from pipetransformer import DataInfo, Dataset, SpecError, Training, current_micro_batch, load_model, train
from pipetransformer.data import TensorSplit, load_dataset
from pipetransformer.data.tokens import encode_bytes
from pipetransformer.errors import StorageError
from pipetransformer.library import predict
from pipetransformer_contract.spec import Data, Model
from tests.testkit.hub import pictures, reviews, save_splits, save_tokenizer, small_options


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def finish(run_dir: Path, /, **parts: Any) -> Path:
    """The model's folder after two steps in this process."""
    said = {"training": Training(steps=2, global_batch_size=8), "freeze": {"policy": "None"}, **parts}
    train(run_dir=run_dir, **said)
    return run_dir / "model"


def transformer(model_type: str, **options: Any) -> Model:
    return Model(name="huggingface", num_layers=2, options=small_options(model_type, **options))


def described(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "pipetransformer.json").read_text())
    return found


def test_a_text_classifier_works_in_a_pipeline_with_the_users_tokenizer_and_labels(tmp_path: Path) -> None:
    options = {"text": "text", "label": "label", "length": 6, "tokenizer": save_tokenizer(tmp_path / "tokenizer")}
    data = Data(name="huggingface", path=save_splits(tmp_path / "data", reviews()), options=options)
    folder = finish(tmp_path / "run", model=transformer("bert"), data=data)

    said = transformers.pipeline("text-classification", str(folder))(["good film", "poor book"], top_k=None)

    inputs, _ = load_dataset(data, dtype=torch.float32).train.batch([2, 1])
    model = load_model(folder)
    with torch.no_grad():
        wanted = model(inputs, attention_mask=(inputs != 0).long()).logits.softmax(dim=-1)
    for found, scores in zip(said, wanted, strict=True):
        assert {each["label"] for each in found} == {"negative", "positive"}
        assert {each["label"]: each["score"] for each in found} == pytest.approx(
            {"negative": float(scores[0]), "positive": float(scores[1])}, abs=1e-5
        )
    assert model.config.label2id == {"negative": 0, "positive": 1}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("good good good good good good good")["input_ids"] == [2, *[5] * 7, 3], "it cuts nothing by itself"


def test_bytes_are_saved_as_a_tokenizer_so_that_a_pipeline_sees_what_was_trained(tmp_path: Path) -> None:
    options = {"task": "Class", "length": 24, "packages": ["json", "dbm"]}
    folder = finish(tmp_path / "run", model=transformer("roberta"), data=Data(name="text", options=options))

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("a b", " Grüße \n\n🙂", "</s> <pad>", ""):
        assert tokenizer(text)["input_ids"] == encode_bytes(text)
        assert tokenizer.decode(encode_bytes(text), skip_special_tokens=True) == text
    found = transformers.pipeline("text-classification", str(folder))("decode JSON", truncation=True)
    assert found[0]["label"] in ("json", "dbm")


def test_a_language_model_of_bytes_writes_on_in_a_pipeline(tmp_path: Path) -> None:
    data = Data(name="text", options={"length": 24, "packages": ["json"]})
    folder = finish(tmp_path / "run", model=transformer("gpt2"), data=data)

    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id) == (1, 2)
    writer = transformers.pipeline("text-generation", str(folder))
    assert writer.tokenizer("ab")["input_ids"] == encode_bytes("ab")[:-1], "a text that goes on has no end"
    assert writer("ab", max_new_tokens=3)[0]["generated_text"].startswith("ab")


def test_a_masked_model_fills_masks_in_a_pipeline(tmp_path: Path) -> None:
    data = Data(name="text", options={"length": 24, "packages": ["json"], "task": "MaskedToken"})
    model = transformer("distilbert").model_copy(update={"architecture": "DistilBertForMaskedLM"})
    folder = finish(tmp_path / "run", model=model, data=data)

    assert len(transformers.pipeline("fill-mask", str(folder))("a <mask> b")) == 5


def test_a_picture_classifier_works_in_a_pipeline_with_the_scaling_of_training(tmp_path: Path) -> None:
    table = pictures()
    options = {"image": "image", "label": "label"}
    data = Data(name="huggingface", path=save_splits(tmp_path / "data", table), options=options)
    folder = finish(tmp_path / "run", model=transformer("vit", patch_size=4), data=data)

    said = transformers.pipeline("image-classification", str(folder))(table[3]["image"])

    with torch.no_grad():
        logits = load_model(folder)(load_dataset(data, dtype=torch.float32).train.batch([3])[0]).logits
    wanted = dict(zip(("cat", "dog"), logits.softmax(dim=-1)[0].tolist(), strict=True))
    assert {each["label"]: each["score"] for each in said} == pytest.approx(wanted, abs=1e-5)


def pretrained(folder: Path) -> Path:
    """A checkpoint with its tokenizer, as of the hub."""
    config = transformers.DistilBertConfig(n_layers=2, vocab_size=11, dim=16, n_heads=2, hidden_dim=32, num_labels=2)
    config.id2label = {0: "no", 1: "yes"}
    transformers.DistilBertForSequenceClassification(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


class Tokens:
    """Samples that a program has tokenized by itself."""

    def __len__(self) -> int:
        return 16

    def batch(self, ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.tensor([[2, 5 + each % 6, 9, 3] for each in ids])
        return rows, rows[:, 1] % 2


def test_the_tokenizer_of_a_checkpoint_goes_on_where_the_data_bring_none(tmp_path: Path) -> None:
    theirs = pretrained(tmp_path / "theirs")
    data = Dataset(Tokens(), Tokens(), DataInfo((4,), num_classes=2, vocab_size=11))
    folder = finish(tmp_path / "run", model=Model(name="huggingface", path=str(theirs), num_layers=2), data=data)

    assert (folder / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    assert transformers.pipeline("text-classification", str(folder))("good film")[0]["label"] in ("no", "yes")


def test_the_tokenizer_that_a_dataset_brings_is_saved_in_place_of_the_checkpoints(tmp_path: Path) -> None:
    theirs = pretrained(tmp_path / "theirs")
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs, model_max_length=77)
    info = DataInfo((4,), num_classes=2, vocab_size=11, labels=("even", "odd"))
    data = Dataset(Tokens(), Tokens(), info, processor=tokenizer)
    folder = finish(tmp_path / "run", model=Model(name="huggingface", path=str(theirs), num_layers=2), data=data)

    classifier = transformers.pipeline("text-classification", str(folder))
    assert classifier.tokenizer.model_max_length == 77
    assert classifier("good film")[0]["label"] in ("even", "odd")


class Chatting:
    """A tokenizer with several chat templates, as transformers saves them."""

    def save_pretrained(self, save_directory: str) -> None:
        templates = Path(save_directory) / "additional_chat_templates"
        templates.mkdir()
        (templates / "tool_use.jinja").write_text("{{ tools }}")


def test_the_folders_of_a_tokenizer_are_saved_with_the_model(tmp_path: Path) -> None:
    data = Dataset(Tokens(), Tokens(), DataInfo((4,), num_classes=2, vocab_size=11), processor=Chatting())
    folder = finish(tmp_path / "run", model=transformer("bert"), data=data)

    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    filesystem = fsspec.filesystem("memory")
    filesystem.put(str(folder), f"/{tmp_path.name}", recursive=True)
    assert load_model(f"memory://{tmp_path.name}").config.num_labels == 2


def build() -> list[nn.Module]:
    return [nn.Linear(4, 8), nn.Dropout(0.5), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)]


def squares() -> TensorDataset:
    return TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 2)


def test_a_model_of_a_programs_own_function_is_loaded_by_its_folder_alone(tmp_path: Path) -> None:
    folder = finish(tmp_path / "run", model=build, data=(squares(), squares()))

    model = load_model(folder)

    assert sorted(model.state_dict()) == ["blocks.1.0.bias", "blocks.1.0.weight", *sorted(
        f"{unit}.{name}" for unit in ("embedding", "head") for name in ("bias", "weight")
    )]  # fmt: skip
    inputs, _ = squares().tensors
    found = model.predict(inputs, batch_size=5)
    torch.testing.assert_close(found.outputs, model(inputs).detach(), rtol=1e-5, atol=1e-6)
    assert found.outputs.shape == (16, 2)
    assert found.classes.tolist() == found.outputs.argmax(dim=1).tolist() and found.labels == []
    with pytest.raises(ValueError, match=r"inputs have shape \(16, 3\), not \(samples, 4\)"):
        model.predict(inputs[:, :3])


def test_a_model_of_a_lambda_is_loaded_with_the_function_and_refused_in_words_without(tmp_path: Path) -> None:
    folder = finish(tmp_path / "run", model=lambda: build(), data=(squares(), squares()))

    with pytest.raises(SpecError, match=r"cannot be imported: pass the function .*load_model\(folder, model="):
        load_model(folder)
    named = load_model(folder, model=build)
    assert described(folder)["function"] == ""
    assert torch.equal(named.state_dict()["head.bias"], torch.from_numpy(_weights(folder)["head.bias"]))


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return dict(load_file(folder / "model.safetensors"))


def imported(info: DataInfo, *, width: int) -> pipetransformer.PipelineModel:
    """As a manifest names it."""
    blocks: list[nn.Module] = [nn.Linear(width, width) for _ in range(2)]
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
    return pipetransformer.PipelineModel(first, blocks, nn.Linear(width, info.num_classes), (width,))


@pytest.mark.parametrize("name", ["vit", f"{__name__}:imported"])
def test_models_that_a_manifest_names_are_loaded_and_predict_with_the_names_of_classes(
    name: str, tmp_path: Path
) -> None:
    options = {"options": {"width": 8}} if ":" in name else {"hidden_size": 16, "mlp_size": 16}
    model, data = Model(name=name, num_layers=2, **options), Data(name="digits")
    folder = finish(tmp_path / "run", model=model, data=data, training=Training(steps=2, precision="Float64"))

    loaded = load_model(str(folder))

    inputs, _ = load_dataset(data, dtype=torch.float64).test.batch(range(7))
    found = loaded.predict(inputs.float())
    assert found.outputs.dtype == torch.float64 and len(found.labels) == 7
    assert list(found.labels) == [str(each) for each in found.classes.tolist()]
    assert loaded.config.dtype == "float64" and loaded.config.labels == tuple("0123456789")


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=1)


def asking(info: DataInfo) -> pipetransformer.PipelineModel:
    """A classifier of texts whose shapes follow from what it is told of the data."""
    assert info.task == "Class" and info.end_id is not None
    width = sum(info.lengths) + info.end_id
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for _ in range(2)]
    embedding = nn.Embedding(info.vocab_size, 8, padding_idx=info.pad_id)
    head = nn.Sequential(Mean(), nn.Linear(8, info.num_classes))
    return pipetransformer.PipelineModel(embedding, blocks, head, (info.lengths[-1], 8))


def test_the_function_of_a_model_is_told_of_the_data_as_it_was_in_training(tmp_path: Path) -> None:
    data = Data(name="text", options={"task": "Class", "length": [8, 24], "packages": ["json", "dbm"]})
    folder = finish(tmp_path / "run", model=Model(name=f"{__name__}:asking", num_layers=2), data=data)

    model = load_model(folder)

    assert model.embedding.padding_idx == 0
    assert model.predict(torch.tensor([encode_bytes("decode")])).labels[0] in ("dbm", "json")


def test_a_model_of_bytes_is_saved_where_transformers_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = Data(name="text", options={"task": "Class", "length": [8, 24], "packages": ["json", "dbm"]})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    folder = finish(tmp_path / "run", model=Model(name=f"{__name__}:asking", num_layers=2), data=data)

    assert sorted(file.name for file in folder.iterdir()) == ["model.safetensors", "pipetransformer.json"]
    assert "saved without its tokenizer of bytes, which needs transformers" in caplog.text


def test_the_description_says_what_is_true_of_the_model(tmp_path: Path) -> None:
    ours = described(finish(tmp_path / "own", model=build, data=(squares(), squares())))
    assert ours["kind"] == "script" and ours["function"] == f"{__name__}:build"
    assert ours["model"] == {"name": "script", "path": "", "architecture": "", "numLayers": 2, "options": {}}
    assert (ours["dtype"], ours["inputDtype"], ours["inputShape"]) == ("float32", "float32", [4])
    assert ours["steps"] == 2 and ours["madeBy"].startswith("pipetransformer 0.")

    text = Data(name="text", options={"length": 24, "packages": ["json", "dbm"], "task": "Class"})
    training = Training(steps=2, global_batch_size=8, precision="BFloat16")
    theirs = described(finish(tmp_path / "bert", model=transformer("bert"), data=text, training=training))
    assert (theirs["kind"], theirs["modelClass"]) == ("transformers", "BertForSequenceClassification")
    assert (theirs["precision"], theirs["dtype"], theirs["inputDtype"]) == ("BFloat16", "float32", "int64")
    assert (theirs["labels"], theirs["task"], theirs["numClasses"]) == (["dbm", "json"], "Class", 2)
    assert "hiddenSize" not in theirs["model"]


def test_the_folder_of_a_run_is_not_taken_for_the_models(tmp_path: Path) -> None:
    finish(tmp_path / "run", model=build, data=(squares(), squares()))
    with pytest.raises(FileNotFoundError, match=r"no finished model: .* \(did you mean .*/model\?\)"):
        load_model(tmp_path / "run")


def predicted(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipetransformer", "predict", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_says_the_class_of_each_input(tmp_path: Path) -> None:
    model = Model(name="vit", num_layers=2, hidden_size=16, mlp_size=16)
    folder = finish(tmp_path / "run", model=model, data=Data(name="digits"))
    inputs, _ = load_dataset(Data(name="digits"), dtype=torch.float32).test.batch(range(3))
    np.save(tmp_path / "inputs.npy", inputs.numpy())

    lines = [json.loads(line) for line in predicted(folder, "--inputs", tmp_path / "inputs.npy").stdout.splitlines()]

    found = load_model(folder).predict(inputs)
    assert [line["class"] for line in lines] == found.classes.tolist()
    assert [line["label"] for line in lines] == list(found.labels)
    assert [line["score"] for line in lines] == pytest.approx(found.scores.tolist(), abs=1e-6)


def test_the_command_runs_a_model_of_transformers_on_few_inputs_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Data(name="text", options={"task": "Class", "length": 24, "packages": ["json", "dbm"]})
    folder = finish(tmp_path / "run", model=transformer("bert"), data=data)
    inputs, _ = load_dataset(data, dtype=torch.float32).train.batch(range(5))
    np.save(tmp_path / "inputs.npy", inputs.numpy())
    command = [str(folder), "--inputs", str(tmp_path / "inputs.npy")]
    predict.main(command)
    at_once = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    monkeypatch.setattr(predict, "_POSITIONS", 2 * 24)
    forwards, forward = [], transformers.BertForSequenceClassification.forward

    def note(model: Any, tokens: torch.Tensor, **named: Any) -> Any:
        forwards.append(len(tokens))
        return forward(model, tokens, **named)

    monkeypatch.setattr(transformers.BertForSequenceClassification, "forward", note)
    predict.main(command)
    in_batches = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert forwards == [2, 2, 1]
    assert [line["class"] for line in in_batches] == [line["class"] for line in at_once]
    assert [line["score"] for line in in_batches] == pytest.approx([line["score"] for line in at_once], abs=1e-6)


class Pooled(nn.Module):
    """The mean over the positions that are no padding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = current_micro_batch().lengths
        assert lengths is not None
        used = (torch.arange(x.shape[1]) < lengths[:, None])[..., None]
        return (x * used).sum(dim=1) / lengths[:, None]


def pooling(info: DataInfo) -> pipetransformer.PipelineModel:
    head = nn.Sequential(Pooled(), nn.Linear(8, info.num_classes))
    return pipetransformer.PipelineModel(nn.Embedding(info.vocab_size, 8), [nn.Linear(8, 8)], head, (24, 8))


@pytest.mark.parametrize("name", ["bert", "pooling"])
def test_the_command_tells_padding_from_tokens_as_the_training_did(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = transformer("bert") if name == "bert" else Model(name=f"{__name__}:pooling", num_layers=1)
    data = Data(name="text", options={"task": "Class", "length": 24, "packages": ["json", "dbm"]})
    folder = finish(tmp_path / "run", model=model, data=data)
    rows = [torch.tensor([encode_bytes(text)]) for text in ("decode", "a database of keys")]
    padded = [nn.functional.pad(row, (0, 24 - row.shape[1])) for row in rows]
    np.save(tmp_path / "inputs.npy", torch.cat(padded).numpy())

    predict.main([str(folder), "--inputs", str(tmp_path / "inputs.npy")])

    trained = load_model(folder)
    with torch.no_grad():
        outputs = [
            trained(row).logits if name == "bert" else trained(row, torch.tensor([row.shape[1]])) for row in rows
        ]
    wanted = [float(each.softmax(dim=-1).max()) for each in outputs]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["score"] for line in lines] == pytest.approx(wanted, abs=1e-6)


def test_an_evaluation_takes_few_samples_at_a_time_if_they_have_many_positions() -> None:
    taken = []

    class Long:
        def __len__(self) -> int:
            return 5

        def batch(self, ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
            taken.append(len(ids))
            return torch.zeros(len(ids), 1024, dtype=torch.long), torch.zeros(len(ids), 1024, dtype=torch.long)

    model = pipetransformer.PipelineModel(nn.Embedding(3, 4), [nn.Identity()], nn.Linear(4, 3), (1024, 4))
    assert 0 <= predict.accuracy(model, Long()) <= 1
    assert taken == [2, 2, 1]


def without_held_out(path: str, dtype: torch.dtype) -> Dataset:
    dataset = load_dataset(Data(name="digits"), dtype=dtype)
    return Dataset(dataset.train, TensorSplit(torch.zeros(0, 1, 8, 8), torch.zeros(0)), dataset.info)


def test_the_command_says_that_there_are_no_held_out_samples(tmp_path: Path) -> None:
    model, data = Model(name="vit", num_layers=1, hidden_size=16), Data(name=f"{__name__}:without_held_out")
    folder = finish(tmp_path / "run", model=model, data=data)
    with pytest.raises(SystemExit, match="has no held-out samples: give inputs by --inputs"):
        predict.main([str(folder)])


def test_the_command_says_that_samples_of_a_program_have_to_be_given(tmp_path: Path) -> None:
    ended = predicted(finish(tmp_path / "run", model=build, data=(squares(), squares())))
    assert ended.returncode == 1 and "give inputs by --inputs" in ended.stderr and "Traceback" not in ended.stderr


def test_weights_of_another_number_of_layers_are_refused(tmp_path: Path) -> None:
    def of(layers: int) -> Any:
        return lambda: [nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(layers)), nn.Linear(8, 2)]

    folder = finish(tmp_path / "run", model=of(3), data=(squares(), squares()))

    assert "blocks.2.bias" in load_model(folder, model=of(3)).state_dict()
    with pytest.raises(RuntimeError, match=r"no place for 2 weights in .*, such as blocks\.2\.bias; was the function"):
        load_model(folder, model=of(2))
    with pytest.raises(RuntimeError, match=r"(?s)do not fit blocks\.3; was the function .* changed .*Missing key"):
        load_model(folder, model=of(4))


PROGRAM = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from pipetransformer import Training, train

def model():
    return [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)]

data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 2)
train(model=model, data=(data, data), training=Training(steps=2, global_batch_size=8), run_dir="run")
"""


def test_loading_a_model_does_not_train_it_again(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True, capture_output=True)
    loading = [sys.executable, "-c", "from pipetransformer import load_model; load_model('run/model')"]

    refused = subprocess.run(loading, cwd=tmp_path, capture_output=True, text=True)

    assert refused.returncode == 1
    assert "load_model imports this program: call train under `if __name__ == '__main__':`" in refused.stderr
    assert not (tmp_path / "run" / "earlier").exists()
    guarded = PROGRAM.replace("data = ", "if __name__ == '__main__':\n    data = ").replace("\ntrain(", "\n    train(")
    (tmp_path / "program.py").write_text(guarded)
    subprocess.run(loading, cwd=tmp_path, check=True, capture_output=True)


def test_a_temporary_folder_that_fails_loses_no_weights_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    folder = finish(tmp_path / "run", model=build, data=(squares(), squares()))
    assert "head.bias" in load_model(folder).state_dict()

    options = {"text": "text", "label": "label", "length": 6}
    data = Data(name="huggingface", path=save_splits(tmp_path / "data", reviews()), options=options)
    with pytest.raises(StorageError, match=r"the temporary folder .*missing \(TMPDIR\): \[Errno 2\]"):
        finish(tmp_path / "other", model=transformer("bert"), data=data)
