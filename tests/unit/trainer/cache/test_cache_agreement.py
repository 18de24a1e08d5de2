"""All workers cache, or none does."""

from pathlib import Path

import pytest

from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Scripted, run_job

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(("stages", "pipelines"), [(2, 1), (1, 2)])
def test_no_worker_caches_if_one_of_them_saw_inputs_change(stages: int, pipelines: int, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    spec = TrainerSpec.model_validate(
        {
            "model": {
                "name": "vit", "numLayers": 4, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4,
            },
            "data": {"name": "tests.testkit.user_code.rarely_changing:load", "path": str(seen)},
            "training": {"steps": 6, "globalBatchSize": 24},
            "freeze": {"policy": "Explicit", "boundaries": [{"step": 0, "boundary": 2}]},
            "pipeline": {"stages": stages, "microBatchSize": 6, "frozenForward": "Ahead"},
            "cache": {"policy": "Always"},
            "numShards": 2,
            "workers": 2,
        }
    )  # fmt: skip
    script = [Scripted(stages, pipelines, [0, 1]), Scripted(stages, pipelines, [0, 1], at_step=2)]

    run = run_job(spec, script, tmp_path / "run")

    assert seen.exists(), "one worker saw it"
    assert [step["step"] for step in run.steps] == list(range(6))
    assert len(run.summary["generations"]) == len(script), "none broke"
    assert run.summary["cache"] == []
