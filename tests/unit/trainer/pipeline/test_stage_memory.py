"""What a stage holds between rounds does not grow with what it was given before."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.data import DataInfo, MicroBatch, deal, weights_of
from pipetransformer.models import PipelineModel
from pipetransformer.models.metrics import Metric
from pipetransformer.pipeline import StageRunner
from tests.testkit.trainer.ranks import run_ranks
from tests.testkit.trainer.stages import make_runner

pytestmark = pytest.mark.timeout(120)

WIDTH, CLASSES = 8, 3
MICRO_BATCH = 2


class Samples:
    """`count` rows; remembers how many were read at once."""

    info = DataInfo((WIDTH,), CLASSES)

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, WIDTH, generator=generator)
        self.targets = torch.randint(CLASSES, (count,), generator=generator)
        self.most_read = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.most_read = max(self.most_read, len(ids))
        return self.inputs[list(ids)], self.targets[list(ids)]


def make_model() -> PipelineModel:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    return PipelineModel(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, CLASSES), (WIDTH,))


def frozen_runner(group: dist.ProcessGroup, model: PipelineModel) -> StageRunner:
    gc.freeze()  # `held_bytes` need not visit all that was imported
    return make_runner(group, model)


def micro_batches_of(count: int) -> list[MicroBatch]:
    return deal([list(range(count))], 1, MICRO_BATCH)[0]


def metrics_of(model: PipelineModel) -> list[Metric]:
    return [model.loss, lambda output, target, weight: (model.correct(output, target, weight), weight.sum())]


def held_bytes(*, collect: bool = True) -> int:
    """Of all tensors of this process."""
    if collect:
        gc.collect()
    storages = [tensor.untyped_storage() for tensor in gc.get_objects() if issubclass(type(tensor), Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def evaluate(group: dist.ProcessGroup, counts: Sequence[int]) -> list[tuple[int, int, Any]]:
    """Bytes held, samples read at once, and the sums, after an evaluation of so many samples each."""
    model = make_model()
    runner = frozen_runner(group, model)
    splits = [Samples(count) for count in counts]
    results = []
    for count, split in zip(counts, splits, strict=True):
        scores = runner.evaluate(micro_batches_of(count), split, metrics_of(model), name="test").tolist()
        results.append((held_bytes(), split.most_read, scores))
    return results


def train(group: dist.ProcessGroup, rounds: Sequence[int]) -> list[int]:
    """Bytes held after each round of so many micro-batches."""
    runner, split = frozen_runner(group, make_model()), Samples(max(rounds) * MICRO_BATCH)
    held = []
    for step, count in enumerate(rounds):
        runner.train(step, micro_batches_of(count * MICRO_BATCH), split)
        held.append(held_bytes())
    return held


def drop(group: dist.ProcessGroup) -> tuple[int, int]:
    """Bytes held after a runner has trained and evaluated and is gone; and after another one, of which nothing was
    collected."""
    model, split = make_model(), Samples(8)

    def use_runner() -> None:
        runner = frozen_runner(group, model)
        runner.train(0, micro_batches_of(len(split)), split)
        runner.evaluate(micro_batches_of(len(split)), split, metrics_of(model), name="test")

    use_runner()
    before = held_bytes()
    gc.disable()
    use_runner()
    return before, held_bytes(collect=False)


def in_one_piece(count: int) -> Any:
    """The same sums, one micro-batch after another through the whole model."""
    model, split, scores = make_model(), Samples(count), torch.zeros(2, 2, dtype=torch.float64)
    with torch.no_grad():
        for micro_batch in micro_batches_of(count):
            inputs, targets = split.batch(micro_batch.sample_ids)
            for unit in model.units:
                inputs = unit(inputs)
            weights = weights_of([micro_batch], torch.float32)
            for row, metric in zip(scores, metrics_of(model), strict=True):
                row += torch.stack([torch.as_tensor(part) for part in metric(inputs, targets, weights)]).double()
    return scores.tolist()


@pytest.mark.parametrize("stages", [1, 2])
def test_an_evaluation_holds_no_more_of_a_larger_split(stages: int) -> None:
    counts = [19, 19 + 16 * 10]

    by_stage = run_ranks(stages, evaluate, counts)

    for (small_held, small_read, _), (large_held, large_read, _) in by_stage:
        assert (large_held, large_read) == (small_held, small_read)
    assert [scores for _, _, scores in by_stage[-1]] == [in_one_piece(count) for count in counts]


def test_a_runner_holds_nothing_of_its_rounds_whatever_their_size() -> None:
    for held in run_ranks(2, train, list(range(24, 0, -1))):
        assert set(held) == {held[-1]}


@pytest.mark.parametrize("stages", [1, 2])
def test_what_a_runner_holds_goes_with_it_and_not_when_the_garbage_collector_comes(stages: int) -> None:
    for before, after in run_ranks(stages, drop):
        assert after == before
