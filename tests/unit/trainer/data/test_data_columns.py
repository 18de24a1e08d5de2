"""Tables of the `datasets` library that a program passes as they are."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from pipetransformer import Training, load_model, train
from pipetransformer.data import DataInfo, Dataset, Task, lengths_of, read_batch, script_dataset
from pipetransformer.data.processors import PictureScaling
from pipetransformer.data.tables import with_classes
from pipetransformer.errors import SpecError
from pipetransformer.job.script_parts import Parts
from pipetransformer_contract.spec import Model, TrainerSpec
from tests.testkit.hub import pictures, reviews, save_tokenizer, small_options
from tests.testkit.trainer.harness import Scripted, run_job


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "tokenizer"))


def own(data: Any, processor: Any = None, task: Task | None = None) -> Dataset:
    return script_dataset(data, dtype=torch.float64, processor=processor, task=task)


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


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([0, 1, 1], "row 90 hides tokens before others: pad at the end"),
        ([1, 0, 1], "row 90 hides tokens before others: pad at the end"),
        ([2, 2, 1], "row 90 holds other numbers than 0 and 1"),
        ([1, 1], "row 90 has 2 elements, but 3 in input_ids"),
    ],
)
def test_the_mask_of_each_row_must_leave_its_first_tokens(mask: list[int], words: str) -> None:
    table = datasets.Dataset.from_dict({"input_ids": [[0, 7, 8]] * 100, "attention_mask": [[1] * 3] * 90 + [mask] * 10})
    with pytest.raises(SpecError, match=f"attention_mask: {words}"):
        own(table, task=Task.NEXT_TOKEN)


def test_tokens_of_another_tokenizer_are_refused(tokenizer: Any) -> None:
    table = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 90 + [[1, 11, 3]]})
    assert own(table.select(range(90)), tokenizer, Task.NEXT_TOKEN).info.vocab_size == 11
    for data in (table, (table.select(range(90)), table.select([90]))):
        with pytest.raises(SpecError, match="input_ids holds the token 11, but the tokenizer has only 11 tokens"):
            own(data, tokenizer, Task.NEXT_TOKEN)


def test_tokens_alone_ask_for_the_next_one_and_labels_may_be_their_copy() -> None:
    rows = {"input_ids": [[1, 2, 3], [4, 5, 6]]}
    for columns in (rows, {**rows, "labels": rows["input_ids"]}):
        dataset = own(datasets.Dataset.from_dict(columns), task=Task.NEXT_TOKEN)
        assert dataset.info == DataInfo((3,), 7, 7, task=Task.NEXT_TOKEN)
        inputs, targets = dataset.train.batch([1])
        assert inputs.tolist() == [[4, 5, 6]] and targets.tolist() == [[5, 6, -100]]


def test_a_transform_of_tokens_is_refused() -> None:
    table = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 4})
    with pytest.raises(SpecError, match="input_ids and a function of with_transform, which would not be called"):
        own(table.with_transform(lambda rows: {"input_ids": [row[::-1] for row in rows["input_ids"]]}))


def test_all_rows_are_padded_to_the_longest_of_both_tables() -> None:
    short, long = (datasets.Dataset.from_dict({"input_ids": rows}) for rows in ([[1, 2]], [[3, 4, 5]]))
    for pair in ((short, long), (long, short)):
        dataset = own(pair, task=Task.NEXT_TOKEN)
        assert dataset.info.input_shape == (3,)
        assert [split.batch([0])[0].shape for split in (dataset.train, dataset.test)] == [(1, 3), (1, 3)]


def test_a_row_without_tokens_has_no_target() -> None:
    for rows in ({"input_ids": [[], [4, 5]]}, {"input_ids": [[6, 7], [4, 5]], "attention_mask": [[0, 0], [1, 1]]}):
        inputs, targets = own(datasets.Dataset.from_dict(rows), task=Task.NEXT_TOKEN).train.batch([0, 1])
        assert inputs.tolist() == [[0, 0], [4, 5]] and targets.tolist() == [[-100, -100], [5, -100]]
        split = own(datasets.Dataset.from_dict(rows), task=Task.NEXT_TOKEN).train
        lengths = lengths_of(split, [0, 1], torch.device("cpu"))
        assert lengths is not None and lengths.tolist() == [1, 2], "an attention to no position would be no number"


def test_labels_leave_out_the_tokens_of_a_prompt() -> None:
    rows = {
        "input_ids": [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0], [1, 2, 3, 4, 5]],
        "attention_mask": [[1] * 5, [1, 1, 1, 0, 0], [1] * 5],
        "labels": [[-100, -100, -100, 4, 5], [-100, 7, 8, 0, 0], [-100] * 5],
    }
    dataset = own(datasets.Dataset.from_dict(rows), task=Task.NEXT_TOKEN)
    inputs, targets = dataset.train.batch([2, 1, 0])
    assert inputs.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0], [1, 2, 3, 4, 5]]
    assert targets.tolist() == [[-100] * 5, [7, 8, -100, -100, -100], [-100, -100, 4, 5, -100]]


def test_labels_of_each_row_must_be_tokens_of_the_row(tokenizer: Any) -> None:
    tokens = [[1, 2, 3]] * 100

    def refused(row: list[int], task: Task, *, held_out: bool = False) -> str:
        table = datasets.Dataset.from_dict({"input_ids": tokens, "labels": [*tokens[:90], row, *tokens[91:]]})
        with pytest.raises(SpecError) as error:
            own((table.select(range(90)), table.select(range(90, 100))) if held_out else table, tokenizer, task)
        return str(error.value)

    assert "labels: row 90 holds other tokens than input_ids" in refused([2, 3, 4], Task.NEXT_TOKEN)
    assert "labels: row 0 holds other tokens than input_ids" in refused([2, 3, 4], Task.NEXT_TOKEN, held_out=True)
    assert "labels: row 90 has 2 elements, but 3 in input_ids" in refused([1, 2], Task.NEXT_TOKEN)
    assert "labels: row 90 leaves out targets with -100" in refused([-100, 2, 3], Task.MASKED_TOKEN)


@pytest.mark.timeout(240)
def test_a_model_learns_only_answers_as_that_of_transformers_does_in_every_layout(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        n_embd=8, n_head=2, n_layer=2, vocab_size=11, n_positions=8, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    oracle = transformers.GPT2LMHeadModel(config).double().eval()
    oracle.save_pretrained(tmp_path / "start")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 11, (6, 8), generator=generator)
    tokens[0, 0] = 10  # the vocabulary is that of the model
    labels = tokens.clone()
    for row, prompt in enumerate((2, 7, 4, 8, 1, 3)):
        labels[row, :prompt] = -100
    table = datasets.Dataset.from_dict({"input_ids": tokens.tolist(), "labels": labels.tolist()})

    def losses(stages: int, pipelines: int) -> list[float]:
        spec = TrainerSpec.model_validate(
            {
                "model": {"name": "huggingface", "numLayers": 2, "path": str(tmp_path / "start")},
                "data": {"name": "script"},
                "training": {"steps": 3, "globalBatchSize": 6, "precision": "Float64"},
                "pipeline": {"stages": stages, "microBatchSize": 2},
                "numShards": 2,
                "workers": stages * pipelines,
            }
        )
        script = [Scripted(stages, pipelines, range(stages * pipelines))]
        parts = Parts(data=table)
        run = run_job(spec, script, tmp_path / f"{stages}x{pipelines}", parts=parts)
        return [step["loss"] for step in run.steps]

    alone = losses(1, 1)

    predicted = oracle(tokens).logits[:, :-1].flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(predicted, labels[:, 1:].flatten(), ignore_index=-100)
    assert alone[0] == pytest.approx(wanted.item(), rel=1e-9)
    for layout in ((1, 2), (2, 1)):
        assert losses(*layout) == pytest.approx(alone, rel=1e-9)


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


def test_the_scaling_of_pictures_is_saved_and_no_processor_that_did_not_make_them(tokenizer: Any) -> None:
    table = pictures(4)
    assert own(table).processor == PictureScaling((3, 8, 8), 255.0)
    with pytest.raises(
        SpecError, match=r"processor: does not make the inputs: the trainer itself scales the .* column image"
    ):
        own(table, tokenizer)
    vit = transformers.ViTImageProcessorPil(size={"height": 8, "width": 8})
    assert own(table, vit).processor is vit, "it scales to [-1, 1], too"
    others: list[dict[str, Any]] = [
        {"image_mean": [0.4] * 3}, {"image_std": [0.4] * 3}, {"rescale_factor": 1 / 127.5}, {"do_normalize": False},
        {"do_rescale": False}, {"do_center_crop": True}, {"size": {"height": 8, "width": 16}},
    ]  # fmt: skip
    for change in (*others, {"size": {"height": 16, "width": 16}}, {"size": {"shortest_edge": 8}}):
        with pytest.raises(SpecError, match="processor: does not make the inputs"):
            own(table, transformers.ViTImageProcessorPil(**{"size": {"height": 8, "width": 8}} | change))
    made = datasets.Dataset.from_dict({"pixel_values": [[[[0.5]]]], "label": [0]})
    assert own(made, tokenizer).processor is tokenizer and own(made).processor is None


def modes(*pictures: Image.Image) -> Any:
    """A table of these pictures."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    return datasets.Dataset.from_dict({"image": list(pictures), "label": [0] * len(pictures)}, features=features)


def test_all_pictures_are_read_in_the_mode_of_the_first() -> None:
    colours = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8))
    palette, grey, bits = colours.convert("P"), colours.convert("L"), colours.convert("1")

    def scaled(picture: Image.Image) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(picture)).double() / 127.5 - 1
        return pixels.permute(2, 0, 1) if pixels.dim() == 3 else pixels[None]

    for first, others, mode in (
        (palette, (colours, grey, colours.convert("RGBA"), colours.convert("CMYK")), "RGB"),
        (grey, (bits, grey.convert("RGB")), "L"),
        (bits, (grey,), "L"),
        (grey.convert("LA"), (grey,), "L"),
        (colours.convert("RGBA"), (palette,), "RGBA"),
    ):
        dataset = own(modes(first, *others))
        inputs, _ = dataset.train.batch(range(1 + len(others)))
        for found, picture in zip(inputs, (first, *others), strict=True):
            torch.testing.assert_close(found, scaled(picture.convert(mode)))
        assert dataset.info.input_shape == inputs.shape[1:]


def test_a_picture_with_colours_is_refused_if_the_first_is_grey() -> None:
    grey, red = Image.new("L", (4, 5), 9), Image.new("RGB", (4, 5), "red")
    table = modes(grey, red)
    with pytest.raises(
        SpecError, match=r"samples 1 cannot be read: .* colours .mode RGB of PIL., but the first one is"
    ):
        read_batch(own(table).train, [1], None)
    read = own(table.cast_column("image", datasets.Image(mode="RGB"))).train.batch([1])[0]
    assert read.shape == (1, 3, 5, 4) and read[0, :, 0, 0].tolist() == [1, -1, -1]


def test_pictures_of_more_than_eight_bits_are_refused() -> None:
    deep = Image.fromarray(np.full((4, 5), 40_000, dtype=np.uint16))
    with pytest.raises(SpecError, match=r"a picture has pixels of more than 8 bits \(PIL mode I;16\): convert them"):
        own(modes(deep))
    with pytest.raises(SpecError, match=r"a picture has pixels of more than 8 bits \(PIL mode F\): convert them"):
        own(modes(Image.fromarray(np.full((4, 5), 0.5, dtype=np.float32))))
    later = own(modes(Image.fromarray(np.full((4, 5), 156, dtype=np.uint8)), deep))
    with pytest.raises(SpecError, match=r"one of the samples 1 cannot be read: .* more than 8 bits"):
        read_batch(later.train, [1], None)


def test_pictures_whose_classes_are_texts_are_read_from_where_they_lie() -> None:
    table = pictures(4).remove_columns("label").add_column("label", ["dog", "cat", "dog", "eel"])
    dataset = own((table, table.select([3])))
    assert dataset.info.labels == ("cat", "dog", "eel")
    assert dataset.train.batch([0, 1, 3])[1].tolist() == [1, 0, 2] and dataset.test.batch([0])[1].tolist() == [2]
    torch.testing.assert_close(dataset.train.batch([3])[0], dataset.test.batch([0])[0])


def test_classes_with_other_numbers_in_the_held_out_samples_are_refused() -> None:
    def table(feature: Any, *classes: int) -> Any:
        features = datasets.Features({"x": datasets.Value("float32"), "label": feature})
        return datasets.Dataset.from_dict({"x": [0.0] * len(classes), "label": list(classes)}, features=features)

    pets = table(datasets.ClassLabel(names=["cat", "dog"]), 0, 1)
    with pytest.raises(SpecError, match='class 0 is "cat" in the training split, but "ant" in the held-out one'):
        own((pets, table(datasets.ClassLabel(names=["ant", "cat", "dog"]), 2)))
    with pytest.raises(SpecError, match="column label holds the class 2, but names only 2 classes"):
        own((pets, table(datasets.Value("int64"), 2)))
    assert own((pets, table(datasets.ClassLabel(names=["cat"]), 0))).info.labels == ("cat", "dog")


def test_a_column_of_numbers_is_the_input_in_whatever_format_the_table_is() -> None:
    columns = {"x": [[[1.0, 2.0]], [[3.0, 4.0]]], "label": ["yes", "no"]}
    for kind in (None, "torch", "numpy"):
        dataset = own(datasets.Dataset.from_dict(columns).with_format(kind))
        assert dataset.info == DataInfo((1, 2), 2, labels=("no", "yes"))
        inputs, targets = dataset.train.batch([1])
        assert inputs.tolist() == [[[3.0, 4.0]]] and inputs.dtype == torch.float64 and targets.tolist() == [0]
    numbers = datasets.Dataset.from_dict({"x": [1.0, 2.0], "label": [0.5, 1.5]})
    assert own(numbers).info == DataInfo((), 0) and own(numbers).train.batch([1])[1].tolist() == [1.5]


@pytest.mark.parametrize("kind", ["bool", "int8", "int32", "uint8"])
def test_classes_are_whole_numbers_of_the_type_that_losses_take(kind: str) -> None:
    columns = {"x": [[1.0], [2.0]], "input_ids": [[1, 2], [3, 4]], "label": [False, True]}
    table = datasets.Dataset.from_dict(columns).cast_column("label", datasets.Value(kind))
    plain = table.select_columns(["x", "label"])
    for dataset in (
        own(plain),
        own(
            plain.with_transform(lambda rows: {"x": rows["x"], "label": [torch.tensor(bool(y)) for y in rows["label"]]})
        ),
        own(table, task=Task.CLASS),
    ):
        targets = dataset.train.batch([1, 0])[1]
        assert targets.dtype == torch.int64 and targets.tolist() == [1, 0] and dataset.info.num_classes == 2


def test_a_batch_selects_no_columns_because_that_takes_longer_the_larger_the_table_is(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ragged = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "label": [0, 1]})
    masked = datasets.Dataset.from_dict({"input_ids": [[1, 2], [4, 0]], "attention_mask": [[1, 1], [1, 0]]})
    answers = masked.add_column("labels", [[-100, 2], [-100, 0]])
    numbers = datasets.Dataset.from_dict({"x": [[1.0], [2.0]], "label": [0, 1]})
    splits = [own(table).train for table in (ragged, masked, answers, numbers)]
    monkeypatch.setattr(datasets.Dataset, "select_columns", None)

    for split in splits:
        assert len(split.batch([1, 0])[0]) == 2
    for split in splits[:3]:
        lengths = lengths_of(split, [1], torch.device("cpu"))
        assert lengths is not None and lengths.tolist() == ([2] if split is splits[0] else [1])


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


def test_the_classes_of_a_shuffled_table_are_not_gathered_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library does that in Python, which took 10 s for a million rows."""
    rows = range(9)
    table = datasets.Dataset.from_dict({"x": [[float(row)] for row in rows], "label": [row % 3 for row in rows]})
    shuffled = table.shuffle(seed=1)

    def refuses(self: object, indices: object) -> None:
        raise AssertionError("rows are gathered one by one")

    monkeypatch.setattr(datasets.table.IndexedTableMixin, "fast_gather", refuses)
    numbered, classes, _ = with_classes([shuffled, table], "label")
    assert (numbered[0], classes) == (shuffled, 3)
    with pytest.raises(ValueError, match="row 2 of the training split is -1"):
        with_classes([datasets.Dataset.from_dict({"label": [-1, 0, 1]}).select([1, 2, 0])], "label")
