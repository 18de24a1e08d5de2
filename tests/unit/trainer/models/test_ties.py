"""A parameter that several units share trains as one, whatever stages hold its copies."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from pipetransformer import Pipeline, Training, train
from pipetransformer.freeze.boundary import apply_boundary
from pipetransformer.job.load import load_job
from pipetransformer.models import PipelineModel, ScriptModel, Tie, Ties
from pipetransformer.training.after_step import norms_with_ties
from pipetransformer_contract.spec import Freeze, TrainerSpec
from tests.testkit.trainer.harness import Scripted, run_job
from tests.testkit.trainer.script import Log, samples
from tests.testkit.user_code.tied_model import make_data, make_model

pytestmark = pytest.mark.timeout(240)

EMBEDDING, OUTPUT = (0, "tokens.weight"), (7, "output.weight")
STEPS = 16
OPTIMIZERS = {
    "adamw": {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1},
    "sgd-momentum": {"name": "SGD", "learningRate": 0.1, "momentum": 0.9, "weightDecay": 0.01},
}
TO_ONE_STAGE = [
    Scripted(4, 1, [0, 1, 2, 3]),
    Scripted(2, 2, [0, 1, 2, 3], at_step=6),
    Scripted(1, 4, [0, 1, 2, 3], at_step=12),
]
TO_FOUR_STAGES = [
    Scripted(1, 1, [0]),
    Scripted(2, 1, [0, 1], at_step=3),
    Scripted(4, 1, [3, 2, 1, 0], at_step=9),
]


def model() -> PipelineModel:
    return make_model(make_data("", torch.float64).info)


def test_ties_are_found_by_identity() -> None:
    assert model().ties == Ties((Tie((EMBEDDING, OUTPUT)),))
    assert PipelineModel(nn.Linear(2, 2), [nn.Linear(2, 2)], nn.Linear(2, 2), (2,)).ties == Ties()


class Output(nn.Module):
    """Holds the embedding itself, and not only its table."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.T


def test_a_shorter_model_keeps_the_ties_of_units_that_share_a_module() -> None:
    """Such units are copies in the model, because each draws at places of its own."""

    def shared() -> list[nn.Module]:
        embedding, block = nn.Embedding(9, 8), nn.Linear(8, 8, bias=False)
        return [embedding, block, block, nn.Linear(8, 8), block, Output(embedding)]

    whole = ScriptModel(shared, torch.zeros(1, 3, dtype=torch.long), seed=0, dtype=torch.float64).shell()

    table = Tie(((0, "weight"), (3, "embedding.weight")))
    assert whole.with_layers(2).ties == Ties((table, Tie(((1, "weight"), (2, "weight")))))
    assert whole.with_layers(1).ties == Ties((Tie(((0, "weight"), (2, "embedding.weight"))),))


def test_a_tie_knows_its_stages() -> None:
    tie = Tie((EMBEDDING, OUTPUT))
    assert tie.stages([range(3), range(3, 5), range(5, 8)]) == (0, 2)
    assert tie.stages([range(8)]) == (0,)
    assert tie.stages([[0, 1, 6, 7], [2, 3, 4, 5]]) == (0,), "both ends of a model may be on one worker"


def test_a_tied_parameter_trains_as_long_as_one_of_its_units_does() -> None:
    made = model()
    apply_boundary(dict(enumerate(made.units)), 2, made.ties)
    training = [name for name, parameter in made.embedding.named_parameters() if parameter.requires_grad]
    assert training == ["tokens.weight"]
    assert not made.embedding.training
    assert all(parameter.requires_grad for parameter in made.blocks[2].parameters())


class Again(nn.Module):
    """A block that is all somebody else's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def universal() -> list[nn.Module]:
    """A model that goes through the same weights six times."""
    shared = nn.Linear(8, 8)
    return [nn.Linear(4, 8), *(Again(shared) for _ in range(6)), nn.Linear(8, 2)]


@pytest.mark.parametrize(("policy", "boundaries"), [("NormChange", []), ("GradientNorm", [1, 2, 3])])
def test_blocks_that_share_all_their_weights_do_not_seem_to_have_nothing_to_train(
    policy: str, boundaries: list[int], tmp_path: Path
) -> None:
    log = Log()

    train(
        model=universal,
        data=(samples(64, seed=0), samples(16, seed=1)),
        training=Training(steps=14, global_batch_size=16),
        freeze=Freeze(policy=policy, start_after_steps=0, interval_steps=4),
        pipeline=Pipeline(stages=1, micro_batch_size=16),
        callbacks=[log],
        run_dir=tmp_path,
    )

    assert [boundary for _, boundary in log.of("freeze")] == boundaries


def test_a_unit_that_shares_all_that_it_has_goes_by_the_norms_of_those_where_that_counts() -> None:
    ties = Ties((Tie(((0, "w"), (1, "w"), (3, "w"))), Tie(((1, "v"), (4, "v"))), Tie(((2, "u"), (4, "u")))))
    norms = [0.0, 0.0, 7.0, 3.0, 4.0]
    assert norms_with_ties(norms, 0, ties) == [3.0, 5.0, 7.0, 3.0, 4.0]
    assert norms_with_ties([0.0, 0.0, 7.0, 3.0, 4.0], 1, ties) == [0.0, 0.0, 7.0, 3.0, 4.0]


def make_spec(optimizer: dict[str, Any]) -> TrainerSpec:
    """Sixteen steps in float64; one block freezes early, three later."""
    return TrainerSpec.model_validate(
        {
            "model": {"name": "tests.testkit.user_code.tied_model:make_model", "numLayers": 6},
            "data": {"name": "tests.testkit.user_code.tied_model:make_data"},
            "training": {
                "steps": STEPS,
                "globalBatchSize": 16,
                "optimizer": optimizer,
                "maxGradientNorm": 0.5,
                "precision": "Float64",
            },
            "freeze": {"policy": "Explicit", "boundaries": [{"step": 4, "boundary": 1}, {"step": 10, "boundary": 3}]},
            "pipeline": {"stages": 4, "microBatchSize": 3},
            "numShards": 4,
            "workers": 4,
        }
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tied_model_trains_alike_in_every_layout(name: str, tmp_path: Path) -> None:
    spec = make_spec(OPTIMIZERS[name])
    runs = [
        run_job(spec, script, tmp_path / str(number))
        for number, script in enumerate([[Scripted(1, 1, [0])], TO_ONE_STAGE, TO_FOUR_STAGES])
    ]

    for run in runs[1:]:
        assert len(run.steps) == STEPS
        for ours, theirs in zip(run.steps, runs[0].steps, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9), ours["step"]
            assert ours["gradientNorm"] == pytest.approx(theirs["gradientNorm"], rel=1e-9), ours["step"]
    for run in runs:
        weights = safetensors.torch.load_file(run.run_dir / "model" / "model.safetensors")
        assert torch.equal(weights["embedding.tokens.weight"], weights["head.output.weight"])


def test_one_stage_computes_what_plain_pytorch_does(tmp_path: Path) -> None:
    """Before anything freezes: the tied gradient is the sum of both uses, and its norm counts once."""
    spec = make_spec(OPTIMIZERS["sgd-momentum"])
    run = run_job(spec, [Scripted(1, 1, [0])], tmp_path)

    job = load_job(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.training.seed)
        plain = model()
    for unit in plain.units:
        unit.double()
    parameters = {id(p): p for unit in plain.units for p in unit.parameters()}.values()
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in run.steps[:4]:
        x, target = job.dataset.train.batch([i for shard in job.order.batch(step["step"]) for i in shard])
        for unit in plain.units:
            x = unit(x)
        optimizer.zero_grad()
        loss, weight = plain.loss(x, target, torch.ones(len(target), dtype=torch.float64))
        (loss / weight).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
        assert step["loss"] == pytest.approx((loss / weight).item(), rel=1e-9)
        assert step["gradientNorm"] == pytest.approx(norm, rel=1e-9)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= min(1.0, 0.5 / norm)
        optimizer.step()
