"""Architectures of transformers that a user registers, from a script and from a module that a job names."""

from pathlib import Path
from typing import Any, ClassVar

import datasets
import pytest
import torch
import transformers
from torch import Tensor, nn

from pipetransformer import SpecError, Training, load_model, register_architecture, train
from pipetransformer.data import DataInfo
from pipetransformer.models import MicroBatchContext, architectures, build_model, set_micro_batch
from pipetransformer.models.huggingface import save_pretrained
from pipetransformer_contract.spec import Data, Model
from tests.testkit.hub import SMALL, reviews, save_splits, save_tokenizer

LENGTH, VOCABULARY, CLASSES = 6, 40, 3
LABELLED = DataInfo((LENGTH,), CLASSES, VOCABULARY, pad_id=0)
TOKENS = DataInfo((LENGTH,), VOCABULARY, VOCABULARY, pad_id=0)
ELECTRA = {"model_type": "electra", "embedding_size": 8, **SMALL}
OPT = {
    "model_type": "opt",
    "hidden_size": 16,
    "word_embed_proj_dim": 16,
    "num_attention_heads": 2,
    "ffn_dim": 32,
}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As it is in a new process, once our own are there."""
    monkeypatch.setattr(architectures, "_registered", dict(architectures._registered))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def spec_of(options: dict[str, Any], architecture: str = "") -> Model:
    return Model(name="huggingface", num_layers=2, options=options, architecture=architecture)


@pytest.mark.parametrize(
    ("function", "options", "info", "model_class"),
    [
        ("electra", ELECTRA, LABELLED, transformers.ElectraForSequenceClassification),
        ("electra", {**ELECTRA, "embedding_size": 16}, LABELLED, transformers.ElectraForSequenceClassification),
        ("opt", OPT, TOKENS, transformers.OPTForCausalLM),
    ],
)
def test_a_registered_family_gives_the_logits_of_transformers(
    function: str, options: dict[str, Any], info: DataInfo, model_class: Any, tmp_path: Path
) -> None:
    spec = spec_of(options, f"tests.testkit.hub_families:{function}")
    model = build_model(spec, info, seed=0, dtype=torch.float64)
    with torch.no_grad():
        for unit in model.units:
            for name, parameter in unit.named_parameters():
                if not name.endswith("tokens.weight") and parameter.shape[0] != VOCABULARY:  # which may be tied
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        x = torch.arange(3 * LENGTH).view(3, LENGTH) % VOCABULARY
        lengths = torch.tensor([6, 4, 1]) if info is LABELLED else None
        set_micro_batch(MicroBatchContext(0, range(3), lengths))
        ours = x
        for unit in model.units:
            ours = unit.eval()(ours)
        tensors = {
            f"{model.unit_name(index)}.{name}": tensor
            for index, unit in enumerate(model.units)
            for name, tensor in unit.state_dict().items()
        }
        save_pretrained(spec, info, tensors, tmp_path, dtype=torch.float64)
        theirs = model_class.from_pretrained(tmp_path, dtype=torch.float64).eval()
        mask = {} if lengths is None else {"attention_mask": (torch.arange(LENGTH) < lengths[:, None]).long()}
        torch.testing.assert_close(ours, theirs(x, **mask).logits, rtol=1e-9, atol=1e-9)


def test_a_job_trains_what_a_module_of_the_image_registers_and_its_model_is_loaded(tmp_path: Path) -> None:
    options = {"text": "text", "label": "label", "length": 5, "tokenizer": save_tokenizer(tmp_path / "tokenizer")}
    train(
        model=spec_of(ELECTRA, "tests.testkit.hub_families:electra"),
        data=Data(name="huggingface", path=save_splits(tmp_path / "data", reviews()), options=options),
        training=Training(steps=2, global_batch_size=8),
        run_dir=tmp_path / "run",
    )
    found = transformers.pipeline("text-classification", str(tmp_path / "run" / "model"))("good film")
    assert found[0]["label"] in ("negative", "positive")
    assert isinstance(load_model(tmp_path / "run" / "model"), transformers.ElectraForSequenceClassification)


class Own(transformers.PreTrainedModel):  # type: ignore[misc]
    """A made-up family, whose configuration transformers does not know."""

    class Config(transformers.PreTrainedConfig):  # type: ignore[misc]
        model_type = "made-up"
        vocab_size: int = VOCABULARY
        hidden_size: int = 8
        num_hidden_layers: int = 2
        max_position_embeddings: int = 64

    config_class = Config
    _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding: Any = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2))
        self.score = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.score(x)  # type: ignore[no-any-return]


def test_a_class_of_the_users_own_is_registered_by_a_script_and_trained_by_its_model_type(tmp_path: Path) -> None:
    @register_architecture(Own, task="NextToken")
    def own(model: Any) -> tuple[nn.Module, list[nn.Module], nn.Module]:
        return model.embedding, list(model.layers), model.score

    spec = Model(name="huggingface", num_layers=2, options={"model_type": "made-up"})
    data = Data(name="text", options={"packages": ["json"], "length": 16})
    train(model=spec, data=data, training=Training(steps=2, global_batch_size=4), run_dir=tmp_path / "run")

    model = load_model(tmp_path / "run" / "model")
    assert isinstance(model, Own) and model(torch.zeros(1, 16, dtype=torch.long)).shape == (1, 16, 259)


class Places(nn.Module):
    """Adds two tables to the positions. Only the first is part of the state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(64.0)[:, None] + torch.arange(width) / 8)
        self.register_buffer("drawn", torch.rand(64, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_buffer("table")[: x.shape[1]] + self.get_buffer("drawn")[: x.shape[1]]


class Placed(Own):
    """A family that fills buffers where it makes them, and not in `_init_weights`.

    Attributes:
        devices: of the parameters of each object that was made.
        mean: a buffer that is computed from a parameter.
    """

    class Config(Own.Config):
        model_type = "placed"
        mean = False

    config_class = Config
    devices: ClassVar[list[set[str]]] = []

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        places = Places(config.hidden_size)
        self.embedding = nn.Sequential(self.embedding, places)
        if config.mean:
            places.register_buffer("drawn", self.score.weight.detach().square().sum(0).expand(64, -1), persistent=False)
        self.devices.append({parameter.device.type for parameter in self.parameters()})


def test_buffers_that_a_class_of_the_users_own_fills_where_it_makes_them_are_filled(tmp_path: Path) -> None:
    @register_architecture(Placed, task="NextToken")
    def placed(model: Any) -> tuple[nn.Module, list[nn.Module], nn.Module]:
        return model.embedding, list(model.layers), model.score

    def tables(spec: Model, units: tuple[int, ...] | None = None) -> list[Tensor]:
        model = build_model(spec, TOKENS, seed=3, dtype=torch.float64, units=units)
        return [model.embedding.get_buffer(f"1.{name}") for name in ("table", "drawn")]

    spec, filled = spec_of({"model_type": "placed"}), Places(8).double()
    table, drawn = tables(spec)
    assert torch.equal(table, filled.get_buffer("table"))
    assert 0.4 < drawn.mean() < 0.6 and torch.equal(drawn, tables(spec, ())[1]), "a unit that is received has it, too"

    assert all(devices == {"meta"} for devices in Placed.devices), "no worker holds the whole model"
    mean = tables(spec_of({"model_type": "placed", "mean": True}), ())[1]
    assert mean.device.type == "cpu" and (mean > 0).all()

    pretrained = Placed(Placed.Config())
    pretrained.embedding[1].table.mul_(2)
    pretrained.save_pretrained(tmp_path)
    loaded = tables(Model(name="huggingface", num_layers=2, path=str(tmp_path)))
    assert torch.equal(loaded[0], 2 * table) and torch.equal(loaded[1], drawn)


def refusal(architecture: str, options: dict[str, Any] | None = None) -> str:
    with pytest.raises(SpecError) as refused:
        build_model(spec_of(options or ELECTRA, architecture), LABELLED, seed=0, dtype=torch.float32)
    assert refused.value.field == "spec.model.architecture"
    return str(refused.value)


def test_what_is_registered_wrongly_is_refused_in_words() -> None:
    assert "is not decorated with pipetransformer.register_architecture" in refusal(
        "tests.testkit.hub_families:nothing_registered"
    )
    assert "'tests.testkit.hub_families' has no function 'elektra'" in refusal("tests.testkit.hub_families:elektra")
    assert "cannot import 'tests.no_families'" in refusal("tests.no_families:electra")

    name = "ElectraForSequenceClassification"

    @register_architecture(name, task="Class")
    def broken(model: Any) -> Any:
        return model.nothing

    assert f"the function registered for {name} failed: AttributeError" in refusal(name)

    @register_architecture(name, task="Class")
    def headless(model: Any) -> Any:
        return model.electra.embeddings, list(model.electra.encoder.layer), nn.Identity()

    said = refusal(name, {**ELECTRA, "embedding_size": 16})
    assert f"the function registered for {name} leaves out classifier." in said

    @register_architecture("ElectraForNothing", task="Class")
    def nothing(model: Any) -> Any:
        return model

    assert "has no ElectraForNothing" in refusal("ElectraForNothing")
    assert "of the model type opt, but the model of electra" in refusal("tests.testkit.hub_families:opt")
    with pytest.raises(ValueError, match="'Classes' is not a valid Task"):
        register_architecture(name, task="Classes")


def test_of_two_that_are_registered_for_a_model_type_the_job_names_one() -> None:
    for name in ("ElectraForSequenceClassification", "ElectraForTokenClassification"):
        register_architecture(name, task="Class")(lambda model: model)
    said = refusal("")
    assert "set it to one of ElectraForSequenceClassification, ElectraForTokenClassification: " in said


def test_an_attention_that_asks_for_more_than_ours_gives_is_refused() -> None:
    from pipetransformer.models.huggingface.attention import attention

    module = nn.Linear(1, 1)
    module.is_causal = True  # type: ignore[assignment]
    x = torch.ones(1, 1, 2, 2)
    set_micro_batch(MicroBatchContext(0, [0]))
    with pytest.raises(SpecError, match="Linear needs attention with softcap, which is not supported"):
        attention(module, x, x, x, None, softcap=50.0)
    module.is_causal = False  # type: ignore[assignment]
    with pytest.raises(SpecError, match="Linear needs attention with sliding_window"):
        attention(module, x, x, x, None, sliding_window=1)
    attention(module, x, x, x, None, sliding_window=2, output_attentions=False)
