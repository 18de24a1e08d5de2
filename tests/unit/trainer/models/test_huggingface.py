"""Models of transformers as units: the same logits, fresh weights alike everywhere, masks, and the way back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from pipetransformer.data import BYTE_VOCABULARIES, DataInfo, Task
from pipetransformer.errors import SpecError
from pipetransformer.models import MicroBatchContext, PipelineModel, build_model, build_units, set_micro_batch
from pipetransformer.models.huggingface import load_pretrained, save_pretrained, shell
from pipetransformer_contract.spec import Model

LENGTH, VOCABULARY, CLASSES = 6, 40, 5
TOKENS = DataInfo((LENGTH,), VOCABULARY, VOCABULARY, pad_id=0)
LABELLED = DataInfo((LENGTH,), CLASSES, VOCABULARY, pad_id=0)
IMAGES = DataInfo((1, 8, 8), CLASSES)
SMALL = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2}
LLAMA = {"model_type": "llama", **SMALL, "num_key_value_heads": 2}
BERT = {"model_type": "bert", **SMALL}
ROBERTA = {"model_type": "roberta", **SMALL}
DISTILBERT = {"model_type": "distilbert", "dim": 16, "n_heads": 4, "hidden_dim": 32}
MISTRAL = {"model_type": "mistral", **SMALL, "num_key_value_heads": 2}
QWEN2 = {"model_type": "qwen2", **SMALL, "num_key_value_heads": 2}
QWEN3 = {"model_type": "qwen3", **SMALL, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
VIT = {"model_type": "vit", **SMALL, "patch_size": 4, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def longrope(original_length: int) -> dict[str, Any]:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0, 3.0], "short_factor": [1.0, 1.5]}
    return {**LLAMA, "rope_parameters": {**rope, "original_max_position_embeddings": original_length}}


FAMILIES = {
    "vit": (VIT, IMAGES, transformers.ViTForImageClassification),
    "bert": (BERT, LABELLED, transformers.BertForSequenceClassification),
    "bert-masked": (BERT, TOKENS, transformers.BertForMaskedLM),
    "roberta": (ROBERTA, LABELLED, transformers.RobertaForSequenceClassification),
    "roberta-masked": (ROBERTA, TOKENS, transformers.RobertaForMaskedLM),
    "distilbert": (DISTILBERT, LABELLED, transformers.DistilBertForSequenceClassification),
    "distilbert-masked": (DISTILBERT, TOKENS, transformers.DistilBertForMaskedLM),
    "distilbert-sinusoidal": (
        {**DISTILBERT, "sinusoidal_pos_embds": True},
        LABELLED,
        transformers.DistilBertForSequenceClassification,
    ),
    "gpt2": (GPT2, TOKENS, transformers.GPT2LMHeadModel),
    "llama": (LLAMA, TOKENS, transformers.LlamaForCausalLM),
    "llama-longrope-long": (longrope(LENGTH - 1), TOKENS, transformers.LlamaForCausalLM),
    "llama-longrope-short": (longrope(LENGTH), TOKENS, transformers.LlamaForCausalLM),
    "mistral": (MISTRAL, TOKENS, transformers.MistralForCausalLM),
    "mistral-window": ({**MISTRAL, "sliding_window": 3}, TOKENS, transformers.MistralForCausalLM),
    "mistral-window-of-one": ({**MISTRAL, "sliding_window": 1}, TOKENS, transformers.MistralForCausalLM),
    "qwen2": (QWEN2, TOKENS, transformers.Qwen2ForCausalLM),
    "qwen2-window-tied": ({**QWEN2, **QWEN_WINDOW, "tie_word_embeddings": True}, TOKENS, transformers.Qwen2ForCausalLM),
    "qwen3": (QWEN3, TOKENS, transformers.Qwen3ForCausalLM),
    "qwen3-window": ({**QWEN3, **QWEN_WINDOW}, TOKENS, transformers.Qwen3ForCausalLM),
    "llama-tied": ({**LLAMA, "tie_word_embeddings": True}, TOKENS, transformers.LlamaForCausalLM),
}


def learning(task: Task) -> DataInfo:
    """Tokens whose targets are of this kind."""
    return DataInfo((LENGTH,), VOCABULARY, VOCABULARY, task=task)


def spec_of(options: dict[str, Any], **fields: Any) -> Model:
    return Model(name="huggingface", num_layers=2, options=options, **fields)


def build(spec: Model, info: DataInfo, seed: int = 0) -> PipelineModel:
    return build_model(spec, info, seed=seed, dtype=torch.float64)


def tensors_of(model: PipelineModel) -> dict[str, Tensor]:
    return {
        f"{model.unit_name(index)}.{name}": tensor
        for index, unit in enumerate(model.units)
        for name, tensor in unit.state_dict().items()
    }


def inputs_of(info: DataInfo, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if info.vocab_size:
        return torch.randint(info.vocab_size, (count, *info.input_shape), generator=generator)
    return torch.randn(count, *info.input_shape, generator=generator, dtype=torch.float64)


def forward(model: PipelineModel, x: Tensor, lengths: Tensor | None = None, *, training: bool = False) -> Tensor:
    set_micro_batch(MicroBatchContext(0, range(len(x)), lengths))
    for unit in model.units:
        x = unit.train(training)(x)
    return x


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_gives_the_same_logits_in_transformers(family: str, tmp_path: Path) -> None:
    options, info, cls = FAMILIES[family]
    spec, x = spec_of(options, architecture=cls.__name__), inputs_of(info)
    model = build(spec, info)
    with torch.no_grad():  # no weight as it was initialised, so that none can be forgotten
        for unit in model.units:
            for parameter in unit.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for tie in model.ties.all:
            (first, name), (last, other) = tie.places
            model.units[last].get_parameter(other).copy_(model.units[first].get_parameter(name))
        ours = forward(model, x)
        save_pretrained(spec, info, tensors_of(model), tmp_path, dtype=torch.float64)
        theirs = cls.from_pretrained(tmp_path, dtype=torch.float64).eval()

        assert tuple(ours.shape[1:]) in {(CLASSES,), (LENGTH, VOCABULARY)}
        torch.testing.assert_close(ours, theirs(x).logits, rtol=1e-9, atol=1e-9)
        again = load_pretrained(spec, info, tmp_path, dtype=torch.float64)
        torch.testing.assert_close(forward(again, x), ours, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_padding_is_masked_as_transformers_masks_it(family: str, tmp_path: Path) -> None:
    """In attention that sees all positions; RoBERTa counts positions by the id of padding as well."""
    options, info, cls = FAMILIES[family]
    spec = spec_of(options)
    model = build(spec, info)
    x, lengths = inputs_of(info).clamp(min=1), torch.tensor([6, 4, 1])
    x[1, 4:], x[2, 1:] = 0, 0
    other = x.clone()
    other[1, 4:], other[2, 1:] = 7, 8
    with torch.no_grad():
        ours = forward(model, x, lengths)
        assert torch.equal(ours, forward(model, other, lengths))
        assert not torch.equal(forward(model, x), forward(model, other))
        save_pretrained(spec, info, tensors_of(model), tmp_path, dtype=torch.float64)
        theirs = cls.from_pretrained(tmp_path, dtype=torch.float64).eval()
        mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        torch.testing.assert_close(ours, theirs(x, attention_mask=mask).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("places", [LENGTH, LENGTH + 1])
def test_roberta_has_fewer_positions_than_rows_for_them(places: int) -> None:
    spec = spec_of({**ROBERTA, "max_position_embeddings": places})
    if places > LENGTH:
        build(spec, LABELLED)
        return
    with pytest.raises(
        SpecError, match=rf"spec\.data\.options\.length: samples have 6 tokens, .* {places - 1} positions"
    ):
        build(spec, LABELLED)


def test_roberta_without_an_id_of_padding_is_refused() -> None:
    with pytest.raises(SpecError, match=r"spec\.data\.options\.tokenizer: Roberta.* counts positions .*set pad_id"):
        build(spec_of(ROBERTA), DataInfo((LENGTH,), CLASSES, VOCABULARY))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_unit_built_alone_has_the_weights_of_the_whole_model(family: str) -> None:
    options, info, cls = FAMILIES[family]
    spec = spec_of(options, architecture=cls.__name__)
    torch.manual_seed(3)
    model = build(spec, info)
    torch.manual_seed(4)
    for index, unit in enumerate(model.units):
        alone = build_units(spec, info, [index], seed=0, dtype=torch.float64)[index]
        for (name, one), (_, other) in zip(unit.named_parameters(), alone.named_parameters(), strict=True):
            assert torch.equal(one, other), name
    first, second = (next(block.parameters()) for block in model.blocks)
    assert family.startswith("llama") or first.shape == second.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_units_on_the_meta_device_hold_the_buffers_that_no_state_has(family: str) -> None:
    """So a unit that another worker sends needs nothing but its state."""
    options, info, cls = FAMILIES[family]
    spec = spec_of(options, architecture=cls.__name__)
    units = shell(spec, info, seed=0, dtype=torch.float64).units
    for index, unit in enumerate(units):
        assert all(parameter.is_meta for parameter in unit.parameters())
        built = dict(build_units(spec, info, [index], seed=0, dtype=torch.float64)[index].named_buffers())
        for name, buffer in unit.named_buffers():
            assert name not in unit.state_dict()
            assert torch.equal(buffer, built[name])


def test_fresh_weights_are_as_transformers_draws_them() -> None:
    """In scale: GPT-2 narrows its residual projections by depth, and the tied projection is the embedding."""
    model = build(Model(name="huggingface", num_layers=8, options={**GPT2, "n_embd": 64}), TOKENS)
    assert model.blocks[0].get_parameter("attn.c_proj.weight").std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert model.blocks[0].get_parameter("attn.c_attn.weight").std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(model.embedding.get_parameter("tokens.weight"), model.head.get_parameter("output.weight"))
    assert not torch.equal(*(block.get_parameter("mlp.c_fc.weight") for block in model.blocks[:2]))


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2", "mistral-window", "qwen3-window", "roberta", "vit"])
def test_dropout_belongs_to_samples(family: str) -> None:
    """In embeddings, residuals and attention: a sample's output does not depend on its micro-batch."""
    options, info, _ = FAMILIES[family]
    causal = {"attention_dropout": 0.2} if family.startswith(("mistral", "qwen")) else {}
    model = build(spec_of({**options, **causal}), info)
    x = inputs_of(info)
    together = forward(model, x, training=True)
    assert not torch.allclose(together, forward(model, x))
    set_micro_batch(MicroBatchContext(0, [2, 0]))
    alone = x[[2, 0]]
    for unit in model.units:
        alone = unit.train()(alone)
    torch.testing.assert_close(alone, together[[2, 0]], rtol=1e-9, atol=1e-9)
    assert not any(isinstance(module, nn.Dropout) for unit in model.units for module in unit.modules())


def test_attention_drops_out_as_often_as_the_configuration_says() -> None:
    """All values one: what attention gives is the kept share of its weights."""
    options = {**LLAMA, "attention_dropout": 0.25}
    block = build(spec_of(options), DataInfo((400,), VOCABULARY, VOCABULARY)).blocks[0]
    attention = block.get_submodule("layer.self_attn")
    with torch.no_grad():
        attention.get_parameter("v_proj.weight").zero_()[:, 0] = 1.0
        attention.get_parameter("o_proj.weight").copy_(torch.eye(16))
        x = torch.ones(1, 400, 16, dtype=torch.float64)
        rotary = block.get_submodule("rotary")(x, torch.arange(400).unsqueeze(0))
        set_micro_batch(MicroBatchContext(0, [0]))
        mixed, _ = attention.train()(x, position_embeddings=rotary)
    assert mixed.std() > 0.01
    assert mixed[:, 50:].mean().item() == pytest.approx(1, abs=0.02)


def test_training_starts_from_a_checkpoint(tmp_path: Path) -> None:
    """A body without its head: the head is drawn, alike on every worker."""
    config = transformers.BertConfig(num_hidden_layers=2, vocab_size=VOCABULARY, **SMALL)
    transformers.BertModel(config).save_pretrained(tmp_path)
    spec = Model(name="huggingface", path=str(tmp_path), num_layers=2, options={"hidden_dropout_prob": 0.0})
    model, again = build(spec, LABELLED), build(spec, LABELLED)
    body = transformers.BertModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(model.embedding.get_parameter("word_embeddings.weight"), body.get_input_embeddings().weight)
    assert torch.equal(model.head.get_parameter("classifier.weight"), again.head.get_parameter("classifier.weight"))
    assert model.embedding.get_submodule("dropout").p == 0.0


def test_a_model_that_shall_give_its_attentions_is_saved_so(tmp_path: Path) -> None:
    options, info, cls = FAMILIES["vit"]
    spec = spec_of({**options, "output_attentions": True})

    save_pretrained(spec, info, tensors_of(build(spec, info)), tmp_path, dtype=torch.float64)

    theirs = cls.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    assert len(theirs(inputs_of(info)).attentions) == 2
    pretrained = Model(name="huggingface", path=str(tmp_path), num_layers=2)
    save_pretrained(pretrained, info, tensors_of(build(pretrained, info)), tmp_path / "again", dtype=torch.float64)
    assert cls.from_pretrained(tmp_path / "again").config.output_attentions


@pytest.mark.parametrize("there", [True, False])
def test_how_a_checkpoint_generates_goes_with_its_model(there: bool, tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, bos_token_id=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "theirs")
    theirs = tmp_path / "theirs" / "generation_config.json"
    # A pair that transformers reads, and refuses to write.
    theirs.write_text('{"do_sample": false, "temperature": 0.5, "max_new_tokens": 7, "eos_token_id": [2, 3]}')
    if not there:
        theirs.unlink()
    spec = Model(name="huggingface", path=str(theirs.parent), num_layers=2)

    save_pretrained(spec, TOKENS, tensors_of(build(spec, TOKENS)), tmp_path / "ours", dtype=torch.float64)

    if there:
        assert (tmp_path / "ours" / theirs.name).read_bytes() == theirs.read_bytes()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").generation_config
    assert (loaded.max_new_tokens, loaded.bos_token_id) == ((7, None) if there else (None, 1))


def test_a_checkpoint_of_other_labels_keeps_all_but_its_head_for_them(tmp_path: Path) -> None:
    config = transformers.BertConfig(num_hidden_layers=2, vocab_size=VOCABULARY, num_labels=CLASSES + 2, **SMALL)
    theirs = transformers.BertForSequenceClassification(config)
    theirs.save_pretrained(tmp_path)
    spec = Model(name="huggingface", path=str(tmp_path), num_layers=2)
    head, again = build(spec, LABELLED).head, build(spec, LABELLED).head
    assert torch.equal(head.get_parameter("pooler.dense.weight").float(), theirs.bert.pooler.dense.weight)
    assert head.get_parameter("classifier.weight").shape == (CLASSES, 16)
    assert torch.equal(head.get_parameter("classifier.weight"), again.get_parameter("classifier.weight"))


@pytest.mark.parametrize(
    ("spec", "info", "field"),
    [
        (spec_of({}), TOKENS, "spec.model.options.model_type"),
        (spec_of({"model_type": "gpt3"}), TOKENS, "spec.model.options.model_type"),
        (spec_of({"model_type": "t5"}), TOKENS, "spec.model.architecture"),
        (spec_of(GPT2, architecture="GPT2DoubleHeadsModel"), TOKENS, "spec.model.architecture"),
        (spec_of({**GPT2, "n_embed": 16}), TOKENS, "spec.model.options.n_embed"),
        (spec_of({**GPT2, "n_head": 3}), TOKENS, "spec.model.options"),
        (spec_of({**LLAMA, "hidden_size": 17}), TOKENS, "spec.model.options"),
        (spec_of({**BERT, "hidden_act": "gelu_neww"}), LABELLED, "spec.model.options"),
        (spec_of({**BERT, "num_attention_heads": 0}), LABELLED, "spec.model.options"),
        (spec_of({**GPT2, "activation_function": "gelu-new"}), TOKENS, "spec.model.options"),
        (spec_of({**LLAMA, "rope_parameters": {"rope_type": "liner"}}), TOKENS, "spec.model.options"),
        (spec_of({**GPT2, "vocab_size": 39}), TOKENS, "spec.model.options.vocab_size"),
        (spec_of({**GPT2, "n_positions": 5}), TOKENS, "spec.data.options.length"),
        (spec_of({**GPT2, "n_layer": 3}), TOKENS, "spec.model.numLayers"),
        (spec_of(GPT2), IMAGES, "spec.data"),
        (spec_of(VIT), TOKENS, "spec.data"),
        (spec_of({**VIT, "num_labels": IMAGES.num_classes - 1}), IMAGES, "spec.model.options.num_labels"),
        (spec_of({**VIT, "image_size": 16}), IMAGES, "spec.model.options.image_size"),
        (spec_of({}, path="/no/such/folder"), TOKENS, "spec.model.path"),
        (spec_of(VIT), DataInfo((1, 8, 8), 0), "spec.data"),
        (spec_of(BERT), learning(Task.NEXT_TOKEN), "spec.data.options.task"),
        (spec_of(BERT, architecture="BertForMaskedLM"), learning(Task.NEXT_TOKEN), "spec.data.options.task"),
        (spec_of(GPT2), learning(Task.MASKED_TOKEN), "spec.data.options.task"),
        (spec_of(LLAMA), learning(Task.CLASS), "spec.data.options.task"),
    ],
)
def test_a_model_that_cannot_be_built_names_the_field(spec: Model, info: DataInfo, field: str) -> None:
    with pytest.raises(SpecError) as caught:
        build(spec, info)
    assert caught.value.field == field


def test_a_folder_that_is_not_there_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would speak of the name of a repository."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=rf"^spec\.model\.path: there is no folder {tmp_path}/pretrained/mine/vit$"):
        build(spec_of({}, path="pretrained/mine/vit"), TOKENS)


@pytest.mark.parametrize("num_ids", BYTE_VOCABULARIES)
def test_bytes_are_refused_as_tokens_of_a_pretrained_model_that_has_a_tokenizer(num_ids: int, tmp_path: Path) -> None:
    def pretrained(vocabulary: int) -> Model:
        config = transformers.BertConfig(num_hidden_layers=2, vocab_size=vocabulary, **SMALL)
        transformers.BertModel(config).save_pretrained(folder := tmp_path / str(vocabulary))
        return Model(name="huggingface", path=str(folder), num_layers=2)

    samples = DataInfo((LENGTH,), CLASSES, num_ids)
    build(pretrained(max(BYTE_VOCABULARIES)), samples)  # as what was trained on masked bytes is, to classify
    with pytest.raises(SpecError, match=r"spec\.data\.options\.tokenizer: samples are bytes, but .* 30522 tokens"):
        build(pretrained(30522), samples)


def test_an_option_of_an_older_transformers_says_where_it_is_now() -> None:
    with pytest.raises(SpecError, match=r"rope_theta: LlamaConfig has no rope_theta; it is one of its rope_parameters"):
        build(spec_of({**LLAMA, "rope_theta": 5e5}), TOKENS)


def cut(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-500])


def point(weights: Path) -> None:
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1\n")


@pytest.mark.parametrize("damage", [cut, point, Path.unlink])
def test_a_damaged_checkpoint_is_refused_with_its_path(damage: Callable[[Path], None], tmp_path: Path) -> None:
    config = transformers.BertConfig(num_hidden_layers=2, vocab_size=VOCABULARY, **SMALL)
    transformers.BertModel(config).save_pretrained(tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(SpecError, match=rf"spec\.model\.path: {tmp_path}: [A-Za-z]+Error: .") as caught:
        build(Model(name="huggingface", path=str(tmp_path), num_layers=2), LABELLED)
    assert caught.value.reason == "ModelUnreadable"


@pytest.mark.parametrize(
    ("options", "info", "message"),
    [
        ({"image_size": 8}, IMAGES, r"position_embeddings has shape \(1, 17, 16\), not \(1, 5, 16\)"),
        ({"intermediate_size": 64, "image_size": 16}, DataInfo((1, 16, 16), CLASSES), r"do not fit .* and 3 more"),
    ],
)
@pytest.mark.parametrize("labels", [CLASSES, CLASSES + 2])
def test_an_option_that_would_draw_a_checkpoints_weights_anew_is_refused(
    labels: int, options: dict[str, Any], info: DataInfo, message: str, tmp_path: Path
) -> None:
    config = transformers.ViTConfig(num_hidden_layers=2, image_size=16, patch_size=4, num_channels=1, **SMALL)
    config.num_labels = labels
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    spec = Model(name="huggingface", path=str(tmp_path), num_layers=2, options=options)
    with pytest.raises(SpecError, match=rf"spec\.model\.options: .*{message}"):
        build(spec, info)


@pytest.mark.parametrize("family", ["bert-masked", "gpt2", "llama-tied"])
def test_an_option_that_would_draw_a_tied_embedding_anew_is_refused(family: str, tmp_path: Path) -> None:
    options, _, cls = FAMILIES[family]
    config = transformers.AutoConfig.for_model(**options, num_hidden_layers=2, vocab_size=VOCABULARY)
    cls(config).save_pretrained(tmp_path)
    info = DataInfo((LENGTH,), VOCABULARY + 1, VOCABULARY + 1)
    spec = Model(name="huggingface", path=str(tmp_path), num_layers=2, options={"vocab_size": VOCABULARY + 1})
    spec = spec.model_copy(update={"architecture": cls.__name__})
    with pytest.raises(SpecError, match=rf"spec\.model\.options: vocab_size do not fit .* \({VOCABULARY}, 16\), not"):
        build(spec, info)


def test_a_checkpoint_without_weights_of_the_model_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(num_hidden_layers=1, vocab_size=VOCABULARY, **SMALL)
    transformers.BertModel(config).save_pretrained(tmp_path)
    spec = Model(name="huggingface", path=str(tmp_path), num_layers=2, options={"num_hidden_layers": 2})
    with pytest.raises(SpecError, match=r"spec\.model\.path: .* no weights of .* bert\.encoder\.layer\.1.* missing"):
        build(spec, LABELLED)
