"""The accuracy benchmark: its count of work, its paired statistics, and its runs by the product, on generated data."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.worth.accuracy import lora
from benchmarks.worth.accuracy.paired import Point, at_equal_work, difference
from benchmarks.worth.accuracy.policies import HEAD_ONLY, LORA, NONE, PAPER, policies
from benchmarks.worth.accuracy.report import Row, Table, over_tasks
from benchmarks.worth.accuracy.runs import Kept, Run, fine_tune
from benchmarks.worth.accuracy.tasks import Samples, Task
from benchmarks.worth.accuracy.work import work
from pipetransformer import DataInfo, Model
from pipetransformer.data.order import EpochOrder
from pipetransformer.models import build_model

_MODEL = Model(name="vit", num_layers=4, hidden_size=8, num_heads=2, mlp_size=16, patch_size=2)


def _order(samples: int = 12, batch: int = 4) -> EpochOrder:
    return EpochOrder(seed=0, num_samples=samples, global_batch=batch, num_shards=1)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """Four layers that learn which half of a small image is brighter, from random weights as if they were trained."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 1, 4, 4, generator=generator)
    targets = (inputs[:, 0, :2].sum((1, 2)) > inputs[:, 0, 2:].sum((1, 2))).long()
    samples = Samples(inputs, targets, np.arange(96) >= 64, DataInfo((1, 4, 4), 2))
    model = build_model(_MODEL, samples.info, seed=7, dtype=torch.float32)
    weights = tmp_path / "weights.safetensors"
    named = {f"{model.unit_name(i)}.{n}": t for i, unit in enumerate(model.units) for n, t in unit.state_dict().items()}
    save_file(named, weights)
    return Task("generated", _MODEL, lambda: weights, lambda: samples, 32, 8, 8, 3e-3)


class TestWork:
    def test_the_whole_run_is_one(self) -> None:
        counted = work([0] * 6, _order(), num_layers=4, whole_steps=6)
        assert (counted.plain, counted.cached) == (1, 1)

    def test_a_shorter_run_has_its_share(self) -> None:
        assert work([0] * 3, _order(), num_layers=4, whole_steps=6).plain == 0.5

    def test_the_lowest_layer_that_trains_needs_no_gradient_of_its_input(self) -> None:
        counted = work([2] * 3, _order(), num_layers=4, whole_steps=3)
        assert counted.plain == pytest.approx((2 * 1 + 1 * 2 + 1 * 3) / 12)

    def test_the_cache_saves_the_frozen_forward_from_the_second_epoch_on(self) -> None:
        counted = work([2] * 6, _order(), num_layers=4, whole_steps=6)
        assert counted.cached == pytest.approx(((2 + 2 + 3) + (2 + 3)) / 24)

    def test_after_a_freeze_the_cache_computes_only_the_layers_that_are_newly_frozen(self) -> None:
        counted = work([1] * 3 + [3] * 3, _order(), num_layers=4, whole_steps=6)
        assert counted.cached == pytest.approx(((1 + 2 + 6) + (3 - 1 + 2)) / 24)

    def test_outputs_of_layers_that_train_again_are_lost(self) -> None:
        counted = work([2] * 3 + [1] * 3, _order(), num_layers=4, whole_steps=6)
        assert counted.cached == counted.plain

    def test_a_sample_that_was_not_seen_since_the_freeze_is_not_in_the_cache(self) -> None:
        order = _order()
        counted = work([0, 0, 2, 2, 2, 2], order, num_layers=4, whole_steps=6)
        again = set(order.batch(2)[0]) & {one for step in (3, 4, 5) for one in order.batch(step)[0]}
        assert counted.plain - counted.cached == pytest.approx(2 * len(again) / (12 * 24))

    def test_with_the_head_alone_only_one_forward_is_left(self) -> None:
        counted = work([4] * 6, _order(), num_layers=4, whole_steps=6)
        assert counted.plain == pytest.approx(1 / 3)
        assert counted.cached == pytest.approx(1 / 6)

    def test_adapters_save_a_third_and_nothing_by_the_cache(self) -> None:
        counted = work([0] * 6, _order(), num_layers=4, whole_steps=6, weights=False)
        assert counted.plain == counted.cached == pytest.approx(2 / 3)


class TestPaired:
    def test_the_bound_is_students_and_the_spread_between_seeds_cancels(self) -> None:
        found = difference({0: 70.0, 1: 80.0, 2: 90.0}, {0: 71.0, 1: 80.0, 2: 92.0, 3: 5.0})
        assert found.mean == -1
        assert found.low95 == pytest.approx(-1 - 2.9199856 * 1 / math.sqrt(3))
        assert found.seeds == (0, 1, 2)

    def test_one_pair_has_no_bound_and_no_pair_is_refused(self) -> None:
        assert difference({0: 1.0}, {0: 2.0}).low95 == -math.inf
        with pytest.raises(ValueError, match="no seed is in both"):
            difference({0: 1.0}, {1: 2.0})

    def test_between_two_points_a_curve_is_interpolated_by_seed(self) -> None:
        curve = [Point(0.5, {0: 60.0, 1: 70.0}), Point(1.0, {0: 80.0, 1: 72.0})]
        assert at_equal_work(curve, 0.75, [0, 1]) == {0: 70, 1: 71}

    def test_a_curve_is_allowed_to_do_less_if_that_is_better(self) -> None:
        curve = [Point(0.25, {0: 75.0}), Point(0.5, {0: 60.0}), Point(1.0, {0: 80.0})]
        assert at_equal_work(curve, 0.6, [0]) == {0: 75}

    def test_nothing_is_said_below_the_curve_or_without_its_seeds(self) -> None:
        curve = [Point(0.5, {0: 60.0}), Point(1.0, {0: 80.0, 1: 72.0})]
        assert at_equal_work(curve, 0.4, [0]) == {}
        assert at_equal_work(curve, 0.7, [0, 1]) == {}


class TestRuns:
    def test_a_seed_draws_training_samples_and_never_one_that_is_held_out(self, task: Task) -> None:
        samples = task.samples()
        one, same, other = samples.drawn(1, 32), samples.drawn(1, 32), samples.drawn(2, 32)
        ids = range(32)
        assert torch.equal(one.train.batch(ids)[0], same.train.batch(ids)[0])
        assert not torch.equal(one.train.batch(ids)[0], other.train.batch(ids)[0])
        held_out = one.test.batch(ids)[0]
        assert torch.equal(held_out, other.test.batch(ids)[0])
        assert not any((held_out == image).all(dim=(1, 2, 3)).any() for image in samples.inputs[:64])

    def test_layers_are_pretrained_and_the_head_is_drawn(self, task: Task) -> None:
        one, other = task.build(0), task.build(1)
        pretrained = build_model(_MODEL, task.samples().info, seed=7, dtype=torch.float32)
        for index in range(5):
            for name, tensor in pretrained.units[index].state_dict().items():
                assert torch.equal(one.units[index].state_dict()[name], tensor)
        assert not torch.equal(one.head.state_dict()["classifier.weight"], other.head.state_dict()["classifier.weight"])

    def test_the_product_freezes_as_the_policy_says_and_a_run_repeats_to_the_bit(self, task: Task) -> None:
        known = policies(4)
        run = fine_tune(task, known[PAPER], 0)
        assert run.boundaries == ((0, 0), (4, 2), (8, 3), (16, 4))
        assert run.work_cached < run.work < 1
        assert replace(fine_tune(task, known[PAPER], 0), seconds=run.seconds) == run

    def test_rivals_train_what_they_say(self, task: Task) -> None:
        known = policies(4)
        assert fine_tune(task, known[NONE], 0).work == 1
        shorter = fine_tune(task, known["fewer_epochs_50"], 0)
        assert (shorter.steps, shorter.work) == (16, 0.5)
        assert fine_tune(task, known["top_1"], 0).boundaries == ((0, 3),)
        assert fine_tune(task, known[HEAD_ONLY], 0).boundaries == ((0, 4),)

    def test_the_learning_rate_falls_to_the_end_of_a_shorter_run(self, task: Task) -> None:
        assert task.training(0, 0.5).steps == 16
        assert task.training(0, 0.5).learning_rate_schedule.warmup_steps == 1

    def test_adapters_change_nothing_at_first_and_leave_the_pretrained_weights(self, task: Task) -> None:
        inputs = task.samples().inputs[:3]
        plain, adapted = task.build(0), task.build(0, adapters=True)
        with torch.no_grad():
            outputs = [torch.nn.Sequential(*model.units)(inputs) for model in (plain, adapted)]
        assert torch.equal(*outputs)
        trained = {name for name, parameter in adapted.blocks[0].named_parameters() if parameter.requires_grad}
        assert trained == {
            f"{place}.{part}" for place in ("attn.qkv", "attn.projection", "mlp.0", "mlp.2") for part in ("down", "up")
        }
        run = fine_tune(task, policies(4)[LORA], 0)
        assert run.boundaries == ((0, 0),)
        assert run.work == run.work_cached == pytest.approx(2 / 3)

    def test_every_linear_layer_of_a_block_gets_an_adapter_once(self) -> None:
        block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
        lora.adapt([block])
        assert [type(module).__name__ for module in block.modules()].count("Adapted") == 2

    def test_kept_runs_survive_and_count_only_for_their_settings(self, task: Task, tmp_path: Path) -> None:
        policy, path = policies(4)["fewer_epochs_25"], tmp_path / "runs.jsonl"
        run = fine_tune(task, policy, 0)
        Kept(path).add(run)
        assert Kept(path).find(task, policy, 0) == run
        assert Kept(path).find(task, policy, 1) is None
        assert Kept(path).find(replace(task, learning_rate=1e-3), policy, 0) is None


def _row(name: str, accuracies: dict[int, float], work_cached: float, thaws: int = 0) -> Row:
    runs = {
        seed: Run("made-up", name, seed, "", accuracy, 8, ((0, 0),), work_cached + 0.1, work_cached, thaws, 0.0)
        for seed, accuracy in accuracies.items()
    }
    return Row(policies(4)[name], runs)


class TestReport:
    _NONE = _row(NONE, {0: 0.90, 1: 0.92, 2: 0.91}, 1.0)

    def _table(self, *rows: Row, limit: float = 0.6) -> Table:
        return Table([self._NONE, *rows], limit, choosing=(0, 1), confirming=(2,))

    def test_the_recommended_setting_is_the_best_of_those_with_little_enough_work(self) -> None:
        table = self._table(
            _row(PAPER, {0: 0.80, 1: 0.82}, 0.4),
            _row(f"{PAPER}_from_25", {0: 0.88, 1: 0.90}, 0.55),
            _row(f"{PAPER}_from_50", {0: 0.91, 1: 0.93}, 0.8),
            _row("top_2", {0: 0.91, 1: 0.93}, 0.5),
        )
        found = table.recommended()
        assert found is not None
        assert found.policy.name == f"{PAPER}_from_25"

    def test_the_recommended_setting_is_reported_on_seeds_that_it_was_not_chosen_on(self) -> None:
        best = _row(PAPER, {0: 0.91, 1: 0.93, 2: 0.88}, 0.5)
        shorter = _row("fewer_epochs_50", {0: 0.80, 1: 0.80, 2: 0.87}, 0.5)
        figures = self._table(best, shorter).figures()
        assert figures["recommended"]["confirmed"]
        assert figures["recommended"]["difference"] == pytest.approx(-3)
        assert figures["recommended_minus_fewer_epochs_at_equal_work"] == {
            "mean": pytest.approx(1), "low95": None, "seeds": [2],
        }  # fmt: skip

    def test_without_confirming_runs_the_choosing_seeds_are_reported_and_said_so(self) -> None:
        figures = self._table(_row(PAPER, {0: 0.91, 1: 0.93}, 0.5)).figures()
        assert not figures["recommended"]["confirmed"]
        assert figures["recommended"]["seeds"] == [0, 1]

    def test_a_policy_on_trial_is_compared_with_itself_without(self) -> None:
        plain = _row(PAPER, {0: 0.80, 1: 0.82}, 0.4)
        on_trial = _row(f"{PAPER}_trial", {0: 0.84, 1: 0.85}, 0.7, thaws=1)
        figures = self._table(plain, on_trial).figures()["trial_minus_no_trial"]
        assert figures["mean"] == pytest.approx(3.5)
        assert figures["thaws"] == figures["by_policy"][PAPER]["thaws"] == 2

    def test_a_difference_is_in_points_with_its_bound(self) -> None:
        row = _row(PAPER, {0: 0.89, 1: 0.91, 2: 0.90}, 0.5)
        figures = row.figures(self._NONE)
        assert figures["mean"] == pytest.approx(90)
        assert figures["difference"] == figures["difference_low95"] == pytest.approx(-1)

    def test_over_tasks_the_best_bound_and_the_worst_mean_count(self) -> None:
        key = "recommended_minus_fewer_epochs_at_equal_work"
        one, other = {"mean": 2.0, "low95": 1.0}, {"mean": -1.0, "low95": -2.0}
        found = over_tasks({"near": {key: one}, "far": {key: other}, "brown": {key: {"mean": -9.0, "low95": None}}})
        assert found == {key: {"best_low95": 1.0, "worst_mean": -1.0}}

    def test_runs_that_confirm_a_setting_do_not_change_the_choice(self) -> None:
        changed = _row(PAPER, {0: 0.91, 1: 0.93}, 0.55)
        later = replace(changed.runs[0], seed=2, work_cached=0.99)
        table = self._table(replace(changed, runs={**changed.runs, 2: later}))
        found = table.recommended()
        assert found is not None
        assert found.policy.name == PAPER
