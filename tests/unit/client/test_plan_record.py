"""`plan` predicts what the record of the run shows afterwards."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipetransformer.elastic.transport.groups import TCPStore
from pipetransformer.library.forecast import Forecast
from pipetransformer.partition import Cut
from pipetransformer_client.phases import Phase, phases
from pipetransformer_contract.api import trainer_spec
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.spec import TrainerSpec
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.trainer.ranks import run_ranks
from tests.testkit.trainer.torchrun import set_rank

pytestmark = pytest.mark.timeout(240)

WORKERS = 4
#: Maximum number of steps from a freeze to the next generation, because workers learn of it in a vote.
LAG = 10


def job(model: dict[str, Any], data: dict[str, Any], points: list[tuple[int, int]], steps: int) -> JobBuilder:
    """Four stages on four workers, which become more pipelines. Gives (step, frozen layers) of each freeze."""
    return (
        make_job()
        .set("model", model)
        .set("data", data)
        .set("training", {"steps": steps, "globalBatchSize": 16})
        .set("freeze", {"policy": "Explicit", "boundaries": [{"step": s, "boundary": b} for s, b in points]})
        .set("evaluation", {"everySteps": steps})
        .stages(4)
        .set("pipeline.microBatchSize", 4)
        .workers(WORKERS)
    )


#: Steps between two halvings, at them, and too near to the end for a new cut to pay off.
VIT = job(
    {"name": "vit", "numLayers": 12, "hiddenSize": 16, "numHeads": 2, "mlpSize": 32, "patchSize": 4},
    {"name": "digits"},
    [(10, 7), (35, 9), (46, 10), (58, 11)],
    70,
)
BERT = job(
    {
        "name": "huggingface",
        "numLayers": 8,
        "options": {"model_type": "bert", "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32},
    },
    {"name": "text", "options": {"task": "Class", "length": 16, "packages": ["json", "dbm"]}},
    [(10, 3), (25, 5), (40, 4), (50, 8)],
    60,
)
IMPORTED = job(
    {"name": "tests.testkit.user_code.tied_model:make_model", "numLayers": 6},
    {"name": "tests.testkit.user_code.tied_model:make_data"},
    [(0, 1), (15, 3), (50, 5), (70, 6)],
    70,
)


@dataclass(frozen=True)
class Recorded:
    """A generation of the record. `stages` holds the units of each stage."""

    first_step: int
    layout: Layout
    stages: list[range]

    @property
    def stage_layers(self) -> list[int]:
        units = [list(span) for span in self.stages]
        num_layers = units[-1][-1] - 1
        return [sum(0 < unit <= num_layers for unit in span) for span in units]


def record_of(run_dir: Path) -> list[Recorded]:
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [
        Recorded(line["firstStep"], Layout(line["stages"], line["pipelines"]), list(_spans(line["roles"])))
        for line in lines
        if line["kind"] == "GenerationCommitted"
    ]


def _spans(roles: list[dict[str, Any]]) -> Iterator[range]:
    """Units of each stage. The embedding is with the first layer, the head with the last."""
    first = sorted((role for role in roles if role["pipeline"] == 0), key=lambda role: int(role["stage"]))
    for role in first:
        ((low, high),) = role["layers"]
        start, end = low + 1, high + 2
        yield range(0 if role is first[0] else start, end + 1 if role is first[-1] else end)


def train_on_a_rank(group: dist.ProcessGroup, port: int, folder: str, spec_json: str) -> int:
    from pipetransformer import train

    spec = TrainerSpec.model_validate_json(spec_json)
    set_rank(group, port)
    return train(
        model=spec.model,
        data=spec.data,
        training=spec.training,
        freeze=spec.freeze,
        pipeline=spec.pipeline,
        evaluation=spec.evaluation,
        run_dir=folder,
    ).frozen_layers


def seconds_of_steps(run_dir: Path, generations: list[Recorded], forecast: Forecast) -> list[float]:
    """Time of each step by the step model of `plan`, with the recorded cut and boundary."""
    found = []
    for line in map(json.loads, (run_dir / "steps.jsonl").read_text().splitlines()):
        here = generations[line["generation"] - 1]
        cut = Cut(here.stages, forecast.job.micro_batch_size)
        found.append(forecast.step_seconds(line["frozenLayers"], cut, here.layout.pipelines))
    return found


def changes(planned: list[Phase]) -> list[tuple[Layout, list[int]]]:
    """Layout and layers of each stage at the start and after each regroup."""
    found = [(phase.layout, list(phase.stage_layers)) for phase in planned]
    return [found[0], *(here for here, phase in zip(found, planned, strict=True) if phase.regroups)]


@pytest.mark.parametrize("builder", [VIT, BERT, IMPORTED], ids=["vit", "bert", "imported"])
def test_a_plan_says_of_a_run_what_its_record_shows(builder: JobBuilder, tmp_path: Path) -> None:
    spec = builder.job().spec
    forecast = Forecast.of(trainer_spec(spec))
    planned = phases(spec, forecast)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    frozen = run_ranks(WORKERS, train_on_a_rank, store.port, str(tmp_path), trainer_spec(spec).model_dump_json())

    generations = record_of(tmp_path)
    assert set(frozen) == {planned[-1].boundary}
    assert changes(planned) == [(one.layout, one.stage_layers) for one in generations]
    late: set[int] = set()
    regroups = [phase.first_step for phase in planned if phase.regroups]
    for began, generation in zip(regroups, generations[1:], strict=True):
        assert began is not None and began <= generation.first_step <= began + LAG
        late.update(range(began, generation.first_step))
    for step, shown in enumerate(seconds_of_steps(tmp_path, generations, forecast)):
        promised = [phase for phase in planned if phase.first_step is not None and phase.first_step <= step][-1]
        assert step in late or promised.step_seconds == pytest.approx(shown), step
