"""A run with caches computes what one without them does, through freezes and regroups, and trains each sample once."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Ran, Scripted, run_job
from tests.testkit.trainer.ledger_checker import check

pytestmark = pytest.mark.timeout(240)

TOLERANCE = 1e-9
TRAINING_SAMPLES = 1433  # digits without its held-out fifth
EPOCHS = 3
ENTRY_BYTES = 4 * 16 * 8  # tokens, hidden size, float64

STAY = [Scripted(2, 1, [0, 1])]
WIDEN = [
    Scripted(4, 1, [0, 1, 2, 3]),
    Scripted(2, 2, [0, 1, 2, 3], at_step=8),
    Scripted(1, 4, [3, 2, 1, 0], at_step=20),
]
RELEASE = [Scripted(2, 2, [0, 1, 2, 3]), Scripted(1, 1, [3], at_step=18, leavers=[0, 1, 2])]


def make_spec(cache: dict[str, Any], **training: Any) -> TrainerSpec:
    """Three epochs of 15 steps; one block freezes in the first, three in the second."""
    return TrainerSpec.model_validate(
        {
            "model": {
                "name": "vit", "numLayers": 6, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4,
                "dropout": 0.1,
            },
            "data": {"name": "digits"},
            "training": {
                "epochs": EPOCHS,
                "globalBatchSize": 100,
                "optimizer": {"name": "AdamW", "learningRate": 0.003, "weightDecay": 0.01},
                "precision": "Float64",
            } | training,
            "freeze": {
                "policy": "Explicit",
                "boundaries": [{"step": 3, "boundary": 1}, {"step": 17, "boundary": 3}],
            },
            "pipeline": {"stages": 2, "microBatchSize": 22},
            "cache": cache,
            "numShards": 4,
            "workers": 2,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def uncached(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_job(make_spec({"policy": "Never"}), STAY, tmp_path_factory.mktemp("uncached"))


def sums(run: Ran) -> Counter[str]:
    """What became of the samples in the whole run."""
    total: Counter[str] = Counter()
    for entry in run.summary["cache"]:
        total.update({name: entry[name] for name in ("hits", "advanced", "computed")})
    return total


@pytest.mark.parametrize(
    ("script", "cache"),
    [
        (WIDEN, {"policy": "Always"}),
        (RELEASE, {"policy": "Always", "memoryBytes": 300 * ENTRY_BYTES, "diskBytes": 1 << 30}),
        (STAY, {"policy": "Always", "memoryBytes": TRAINING_SAMPLES // 10 * ENTRY_BYTES}),
    ],
    ids=["widen", "release-disk", "tenth"],
)
def test_a_run_with_caches_computes_what_one_without_does(
    script: Sequence[Scripted], cache: dict[str, Any], uncached: Ran, tmp_path: Path
) -> None:
    run = run_job(make_spec(cache), script, tmp_path)

    assert len(run.steps) == len(uncached.steps)
    for ours, theirs in zip(run.steps, uncached.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE), ours["step"]
        assert ours["gradientNorm"] == pytest.approx(theirs["gradientNorm"], rel=TOLERANCE), ours["step"]
    assert run.summary["test_accuracy"] == uncached.summary["test_accuracy"]
    findings = check(tmp_path, TRAINING_SAMPLES, EPOCHS)
    assert findings.clean and findings.redone == 0, findings.problems
    assert all(sums(run)[name] > 0 for name in ("hits", "advanced", "computed"))
    limit = cache.get("memoryBytes", 2**30)
    for path in (tmp_path / "cache").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            assert json.loads(line)["memoryBytes"] <= limit


def test_entries_follow_their_samples_to_a_new_pipeline(tmp_path: Path) -> None:
    """The joiner does not train step 16's samples before the last epoch, and need not compute them then."""
    spec = make_spec({"policy": "Always"}, epochs=4, globalBatchSize=200)
    run = run_job(spec, [Scripted(1, 1, [0]), Scripted(1, 2, [0, 1], at_step=17)], tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "cache" / "job-w1.jsonl").read_text().splitlines()]
    last_epoch = [line for line in lines if line["epoch"] == 3]
    assert len(run.steps) == 32 and len(last_epoch) == 8
    assert sum(line["hits"] + line["advanced"] for line in last_epoch) >= TRAINING_SAMPLES // 2 - 1
    assert sum(line["computed"] for line in last_epoch) == 0


def test_policy_never_keeps_nothing(uncached: Ran) -> None:
    assert uncached.summary["cache"] == []
    assert not (uncached.run_dir / "cache").exists()
