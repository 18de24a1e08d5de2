"""A process lives through any number of regroups without using more of anything."""

from pathlib import Path

import pytest

from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.trainer.harness import Scripted, Usage, run_job
from tests.testkit.trainer.numerics import ADAMW, make_spec

pytestmark = pytest.mark.timeout(600)

#: Steps between two regroups. On a busy machine the leader may see the next generation some steps late.
STEPS = 10
#: Regroups until everything was done once: buffers, caches and threads have come.
WARM = 6
MEGABYTE = 1 << 20
#: What comes and goes, as connections and the thread that closes outgrown groups; one leaked a regroup would be four.
PASSING = 1


def spec(regroups: int) -> TrainerSpec:
    training = {"steps": STEPS * (regroups + 1), "globalBatchSize": 4, "optimizer": ADAMW, "seed": 1}
    return make_spec(ADAMW, training=training, freeze={"policy": "None"}, pipeline={"stages": 2, "microBatchSize": 2})


def lasting(usage: list[Usage], generations: range) -> Usage:
    """What was used all the time while the generations trained: the least of each."""
    memory, descriptors, threads = zip(*(entry[1:] for entry in usage if entry.generation in generations), strict=True)
    return Usage(generations.start, min(memory), min(descriptors), min(threads))


@pytest.mark.parametrize(
    ("regroups", "megabytes"), [pytest.param(100, 16, marks=pytest.mark.slow), (12, 8)], ids=["hundred", "dozen"]
)
def test_regroups_leak_neither_memory_nor_descriptors_nor_threads(
    regroups: int, megabytes: int, tmp_path: Path
) -> None:
    layouts = [(2, 1), (1, 2)]
    script = [Scripted(*layouts[number % 2], [0, 1], at_step=STEPS * number) for number in range(regroups + 1)]

    run = run_job(spec(regroups), script, tmp_path)

    assert [entry["generation"] for entry in run.summary["generations"]] == list(range(1, regroups + 2))
    for usage in run.usage.values():
        early = lasting(usage, range(WARM, WARM + 4))
        late = lasting(usage, range(regroups - 2, regroups + 2))
        print(f"after {early.generation} regroups {early}, after {late.generation} {late}")
        assert late.descriptors <= early.descriptors + PASSING
        assert late.threads <= early.threads + PASSING
        assert late.memory - early.memory < megabytes * MEGABYTE
