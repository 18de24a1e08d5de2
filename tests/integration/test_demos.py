"""The demos of README and docs, typed as they are written there. They need no cluster."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.testkit import ROOT
from tests.testkit.documented import documented

pytestmark = pytest.mark.timeout(600)
DEMO = "examples/finetune-digits.yaml"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The examples, the tools, and the environment that `make setup` makes."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    return tmp_path


def run(checkout: Path, *commands: str) -> str:
    """Types commands into one shell; what they printed."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shell = ["bash", "-euo", "pipefail", "-c", "\n".join(commands)]
    done = subprocess.run(shell, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


in_short_and_whole = pytest.mark.parametrize(
    "shorter",
    [
        pytest.param(True, id="in short"),
        pytest.param(False, id="as it is", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)


@in_short_and_whole
def test_the_demo_compares_two_runs_and_their_records_are_drawn(checkout: Path, shorter: bool) -> None:
    if shorter:
        shorten(checkout / DEMO, epochs=1, freeze={"startAfterSteps": 10, "intervalSteps": 10}, workers=1)
    said = run(checkout, *recipe(documented("make demo")))
    (drawn,) = documented("pipetransformer timeline")
    run(checkout, *documented("source .venv/bin/activate"), drawn)
    folder = checkout / "runs" / "demo"
    summary = json.loads((folder / "summary.json").read_text())
    assert ("not at the same accuracy" in said.splitlines()[-1]) == (not summary["same_accuracy"])
    assert said.splitlines()[-1].endswith("against the same job without freezing, trained just before on this machine.")
    assert summary["images"] == 364
    assert summary["first_freeze_share_of_time"] is not None
    assert (folder / "demo.png").exists()
    promised = re.findall(r"^\| `(\w+[./]\w*)`", (ROOT / "docs" / "start.md").read_text(), flags=re.MULTILINE)
    for run_of_two in ("unfrozen", "freezing"):
        record = folder / run_of_two
        audited = json.loads((record / "summary.json").read_text())
        assert (audited["samples_lost"], audited["samples_repeated"]) == (0, 0)
        assert audited["test_accuracy"] == pytest.approx(summary[f"accuracy_{run_of_two}"])
        assert not [name for name in promised if not (record / name).exists()], "docs/start.md promises them"
    if not shorter:
        assert summary["share_of_steps_packed"] > 0


@in_short_and_whole
def test_the_shared_demo_starts_the_second_job_on_what_the_first_releases(checkout: Path, shorter: bool) -> None:
    if shorter:
        examples = checkout / "examples" / "shared-cluster"
        shorten(examples / "first.yaml", epochs=4, freeze={"startAfterEpochs": 0, "intervalEpochs": 1})
        shorten(examples / "second.yaml", epochs=1, freeze={"startAfterEpochs": 0, "intervalEpochs": 1})
    said = run(checkout, *recipe(documented("make demo-shared")))
    assert "first holds 2, second holds 2" in said
    assert "started while the first trained" in said.splitlines()[-1]
    assert (checkout / "runs" / "demo-shared" / "gpus.svg").exists()


def recipe(found: Sequence[str]) -> list[str]:
    """What the one documented command of make would run, without the set-up of the environment."""
    (made,) = found
    lines = subprocess.run([*made.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in lines.splitlines() if " runs/" in line]


def shorten(manifest: Path, *, epochs: int, freeze: dict[str, int], workers: int | None = None) -> None:
    """Fewer epochs with other decisions, and, if asked for, one stage on one worker."""
    job = yaml.safe_load(manifest.read_text())
    spec = job["spec"]
    spec["training"]["epochs"] = epochs
    policy = {key: value for key, value in spec["freeze"].items() if key in ("policy", "alpha")}
    spec["freeze"] = {**policy, **freeze}
    if workers is not None:
        spec["pipeline"]["stages"] = workers
        spec["elasticPolicy"] |= {"workers": workers, "maxWorkers": workers}
    manifest.write_text(yaml.safe_dump(job))
