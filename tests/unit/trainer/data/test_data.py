"""The order of samples and their dealing to pipelines."""

import errno
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from pipetransformer.data import (
    DataInfo,
    Dataset,
    Dealer,
    EpochOrder,
    Task,
    TensorSplit,
    augmentation_key,
    deal,
    digest,
    lengths_of,
    load_dataset,
    padded_lengths,
    read_batch,
    script_dataset,
    shards_of,
    weights_of,
)
from pipetransformer.data.order import pipelines_of
from pipetransformer.elastic.transport.watchdog import FLOOR_SECONDS
from pipetransformer.errors import SpecError
from pipetransformer.job.checks import check_targets
from pipetransformer.job.load import load_job
from pipetransformer_contract.spec import Data, Model, Pipeline, TrainerSpec, Training
from tests.testkit.trainer.numerics import ADAMW, make_spec

sizes = st.tuples(st.integers(1, 150), st.integers(1, 40), st.integers(1, 9), st.integers(0, 3)).filter(
    lambda size: size[0] >= size[2]
)

#: Ids of padding, start and end where tokens are bytes.
BYTES: dict[str, Any] = {"pad_id": 0, "start_id": 1, "end_id": 2}


def order(num_samples: int = 100, global_batch: int = 16, num_shards: int = 4, seed: int = 0) -> EpochOrder:
    return EpochOrder(seed=seed, num_samples=num_samples, global_batch=global_batch, num_shards=num_shards)


@given(sizes)
def test_every_sample_comes_exactly_once_an_epoch(size: tuple[int, int, int, int]) -> None:
    num_samples, global_batch, num_shards, epoch = size
    cursor = order(num_samples, global_batch, num_shards)
    steps = range(epoch * cursor.steps_per_epoch, (epoch + 1) * cursor.steps_per_epoch)
    assert sorted(i for step in steps for shard in cursor.batch(step) for i in shard) == list(range(num_samples))


@pytest.mark.parametrize("size", [(3, 2, 4), (4, 0, 2), (4, 2, 0)])
def test_an_order_needs_a_sample_for_each_shard_and_batches_that_are_not_empty(size: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot deal {0} samples to {2} shards in batches of {1}".format(*size)):
        order(*size)


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("count", [100, 15], ids=["large shards", "shards of two or three"])
def test_an_epoch_has_the_order_that_checkpoints_of_earlier_images_continue(count: int, epoch: int) -> None:
    cursor = order(count, count // 5, 7, seed=5)
    shards = np.array_split(np.random.default_rng([5, 0]).permutation(count), 7)

    batches = [cursor.batch(step) for step in range(epoch * 5, epoch * 5 + 5)]

    for number, shard in enumerate(shards):
        found = [sample for batch in batches for sample in batch[number]]
        assert found == np.random.default_rng([5, 1, epoch, number]).permutation(shard).tolist()


@pytest.mark.parametrize(("batch", "shards"), [(7, 7), (1437, 1024)])
def test_there_is_a_shard_for_each_sample_of_a_batch_up_to_what_is_enough(batch: int, shards: int) -> None:
    assert load_job(make_spec(ADAMW, training={"steps": 1, "globalBatchSize": batch})).order.num_shards == shards


@pytest.mark.parametrize(("batch", "workers", "size"), [(64, 2, 16), (64, 8, 4), (100_000, 2, 359)])
def test_micro_batches_divide_a_batch_that_may_be_smaller_than_the_spec_says(
    batch: int, workers: int, size: int
) -> None:
    """Each pipeline of two stages gets four."""
    training = Training(steps=1, global_batch_size=batch)
    spec = TrainerSpec(
        model=Model(name="vit"),
        data=Data(name="digits"),
        training=training,
        pipeline=Pipeline(stages=2),
        workers=workers,
        num_shards=workers // 2,
    )
    assert load_job(spec).micro_batch_size == size


@given(sizes)
def test_every_batch_takes_its_share_of_every_shard(size: tuple[int, int, int, int]) -> None:
    num_samples, global_batch, num_shards, epoch = size
    cursor = order(num_samples, global_batch, num_shards)
    for place in range(cursor.steps_per_epoch):
        batch = cursor.batch(epoch * cursor.steps_per_epoch + place)
        taken = [len(shard) for shard in batch]
        assert sum(taken) == min(global_batch, num_samples - place * cursor.global_batch)
        assert max(taken) - min(taken) <= 2


@pytest.mark.parametrize(
    ("num_samples", "global_batch", "num_shards", "epochs"), [(1433, 100, 100, 400), (209, 40, 4, 400), (45, 8, 8, 300)]
)
def test_samples_stand_in_the_short_last_batch_as_often_and_weigh_as_much_as_in_a_plain_shuffle(
    num_samples: int, global_batch: int, num_shards: int, epochs: int
) -> None:
    cursor, generator = order(num_samples, global_batch, num_shards), np.random.default_rng(0)
    last = num_samples % global_batch

    ours, plain = Counter[int](), Counter[int]()
    for epoch in range(1, epochs + 1):
        ours.update(i for shard in cursor.batch(epoch * cursor.steps_per_epoch - 1) for i in shard)
        plain.update(generator.permutation(num_samples)[-last:].tolist())

    assert ours.total() == plain.total() == epochs * last
    assert len(ours) == len(plain) == num_samples, "each has stood in it"
    spread, of_shuffle = (np.std([found[i] for i in range(num_samples)]) for found in (ours, plain))
    assert spread < 1.15 * of_shuffle
    sizes_of = Counter(map(cursor.shard, range(num_samples)))
    stood = Counter(map(cursor.shard, ours.elements()))
    mean = epochs * last / num_samples
    assert all(stood[shard] / size == pytest.approx(mean, rel=0.1) for shard, size in sizes_of.items())


def test_the_last_batches_of_following_epochs_take_from_other_shards() -> None:
    cursor = order(1433, 100, 100)
    last = [cursor.batch((epoch + 1) * cursor.steps_per_epoch - 1) for epoch in range(3)]

    taken = [[shard for shard, ids in enumerate(batch) if ids] for batch in last]
    assert taken == [list(range(33)), list(range(67, 100)), list(range(34, 67))]


def test_a_sample_stays_in_its_shard_from_epoch_to_epoch() -> None:
    cursor = order()
    epochs: list[list[set[int]]] = []
    for epoch in (0, 1):
        first = epoch * cursor.steps_per_epoch
        batches = [cursor.batch(step) for step in range(first, first + cursor.steps_per_epoch)]
        epochs.append([{i for batch in batches for i in batch[shard]} for shard in range(4)])
    assert epochs[0] == epochs[1]


def test_order_depends_on_seed_and_epoch() -> None:
    assert order().batch(0) == order().batch(0)
    assert order().batch(0) != order(seed=1).batch(0)
    assert order().batch(0) != order().batch(order().steps_per_epoch)


def test_an_epoch_ends_with_its_short_batch() -> None:
    cursor = order(num_samples=100, global_batch=16)
    assert cursor.steps_per_epoch == 7
    assert [cursor.epoch(step) for step in (0, 6, 7, 13, 14)] == [0, 0, 1, 1, 2]
    assert [cursor.batch_size(step) for step in (0, 5, 6, 7, 13)] == [16, 16, 4, 16, 4]


def test_each_epoch_shuffles_each_shard_anew() -> None:
    whole = order(
        num_samples=96, global_batch=16, num_shards=4
    )  # no short batch, so each epoch begins at the same turn
    of_epochs = [
        [[i for step in range(epoch * 6, epoch * 6 + 6) for i in whole.batch(step)[shard]] for shard in range(4)]
        for epoch in range(2)
    ]

    for first, second in zip(*of_epochs, strict=True):
        assert first != second and sorted(first) == sorted(second)


def test_pipelines_serve_about_as_many_shards_each() -> None:
    shared = [shards_of(p, 3, 8) for p in range(3)]
    assert [len(shards) for shards in shared] == [2, 3, 3]
    assert sorted(shard for shards in shared for shard in shards) == list(range(8))
    assert pipelines_of(3, 8) == [next(p for p in range(3) if shard in shared[p]) for shard in range(8)]
    with pytest.raises(ValueError, match="allows only 2"):
        shards_of(0, 3, 2)


@pytest.mark.parametrize(
    ("num_shards", "global_batch", "pipelines"),
    [
        *[(8, 12, 2), (8, 20, 4), (16, 24, 2), (16, 24, 4), (64, 96, 32)],
        *[(96, 96, pipelines) for pipelines in (2, 3, 5, 7, 64, 96)],
    ],
)
def test_every_width_shares_a_batch_as_evenly_as_can_be(num_shards: int, global_batch: int, pipelines: int) -> None:
    cursor = order(1003, global_batch, num_shards)
    for step in range(cursor.steps_per_epoch):
        batch = cursor.batch(step)
        shares = [sum(len(batch[s]) for s in shards_of(p, pipelines, num_shards)) for p in range(pipelines)]
        assert max(shares) <= -(-sum(shares) // pipelines) + (step == cursor.steps_per_epoch - 1)
    for epoch in range(1, 4):  # that begin elsewhere
        steps = range(epoch * cursor.steps_per_epoch, (epoch + 1) * cursor.steps_per_epoch - 1)
        most = [max(sum(len(batch[s]) for s in shards_of(p, pipelines, num_shards)) for p in range(pipelines))
                for batch in map(cursor.batch, steps)]  # fmt: skip
        assert sum(share > -(-global_batch // pipelines) for share in most) <= 1, "where the round begins again"


@given(sizes, st.integers(1, 9), st.integers(1, 10))
def test_dealing_gives_every_sample_once_whatever_the_width(
    size: tuple[int, int, int, int], pipelines: int, micro_batch_size: int
) -> None:
    num_samples, global_batch, num_shards, _ = size
    cursor = order(num_samples, global_batch, num_shards)
    batch = cursor.batch(cursor.steps_per_epoch - 1)
    dealt = deal(batch, min(pipelines, num_shards), micro_batch_size)
    assert all(micro_batches for micro_batches in dealt)
    flat = [micro_batch for micro_batches in dealt for micro_batch in micro_batches]
    assert {len(micro_batch.sample_ids) for micro_batch in flat} == {micro_batch_size}
    real = sorted(i for micro_batch in flat for i in micro_batch.real_ids)
    assert real == sorted(i for shard in batch for i in shard)


@pytest.mark.parametrize("pipelines", [1, 3, 4])
def test_a_samples_user_is_the_pipeline_that_it_is_dealt_to(pipelines: int) -> None:
    dealer = load_job(make_spec(ADAMW)).dealer
    for split, dealt in (
        ("train", dealer.train(2, pipelines, 5)),
        ("test", dealer.test(pipelines, 5)),
    ):
        for pipeline, micro_batches in enumerate(dealt):
            assert {
                dealer.pipeline_of(split, i, pipelines) for micro_batch in micro_batches for i in micro_batch.real_ids
            } == {pipeline}


@pytest.mark.parametrize("pipelines", [1, 2, 3, 4, 7])
def test_every_held_out_sample_is_scored_once_whatever_the_width(pipelines: int) -> None:
    job = load_job(make_spec(ADAMW))
    dealt = job.dealer.test(pipelines, 5)
    scored = [i for micro_batches in dealt for micro_batch in micro_batches for i in micro_batch.real_ids]
    assert sorted(scored) == list(range(len(job.dataset.test)))


def test_nothing_is_dealt_after_the_last_step() -> None:
    job = load_job(make_spec(ADAMW))
    assert all(job.dealer.train(job.total_steps - 1, 2, 5))
    assert job.dealer.train(job.total_steps, 2, 5) == [[], []]


def test_samples_weigh_one_and_padding_nothing() -> None:
    weights = weights_of(deal([[1, 2, 3, 4, 5]], 1, 3)[0], torch.float64)
    assert weights.tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert weights_of(deal([[7], []], 2, 2)[1], torch.float64).tolist() == [0.0, 0.0]


def test_a_pipeline_without_samples_gets_one_padded_micro_batch() -> None:
    only = deal([[7], []], 2, 3)[1]
    assert [micro_batch.real_ids for micro_batch in only] == [()]
    assert only[0].sample_ids == (7, 7, 7)


def test_a_pipeline_pads_with_a_sample_of_its_own_because_its_cache_keeps_that_anyway() -> None:
    assert [[each.sample_ids for each in own] for own in deal([[7], [8]], 2, 3)] == [[(7, 7, 7)], [(8, 8, 8)]]


def test_a_probe_has_all_samples_of_a_small_dataset() -> None:
    dealer = Dealer(tiny("", torch.float32), order(4, 2, 2), total_steps=1)
    assert sorted(i for each in dealer.probe(3) for i in each.real_ids) == [0, 1, 2, 3]


def test_digits_are_split_by_class_and_scaled() -> None:
    dataset = load_dataset(Data(name="digits"), dtype=torch.float64)
    assert len(dataset.train) + len(dataset.test) == 1797
    assert dataset.info == DataInfo((1, 8, 8), 10, task=Task.CLASS, labels=tuple("0123456789"))
    inputs, targets = dataset.test.batch(range(len(dataset.test)))
    assert inputs.dtype == torch.float64
    assert inputs.min() == -1
    assert inputs.max() == 1
    counts = targets.bincount().tolist()
    assert len(counts) == 10
    assert max(counts) - min(counts) <= 2


def tiny(path: str, dtype: torch.dtype, count: int = 4) -> Dataset:
    if path:
        raise FileNotFoundError(path)
    split = TensorSplit(torch.arange(count, dtype=dtype).reshape(count, 1), torch.zeros(count, dtype=torch.long))
    return Dataset(split, split, DataInfo((1,), 1))


def test_a_dataset_can_be_imported_with_options() -> None:
    dataset = load_dataset(Data(name=f"{__name__}:tiny", options={"count": 6}), dtype=torch.float32)
    assert len(dataset.train) == 6
    assert dataset.train.batch([2, 0])[0].flatten().tolist() == [2.0, 0.0]


@pytest.mark.parametrize(
    ("data", "field", "reason"),
    [
        (Data(name="nothing"), "spec.data.name", "InvalidSpec"),
        (Data(name="no_such_module:f"), "spec.data.name", "InvalidSpec"),
        (Data(name=f"{__name__}:no_such_function"), "spec.data.name", "InvalidSpec"),
        (Data(name=f"{__name__}:tiny", path="/missing"), "spec.data.path", "DataUnreadable"),
        (Data(name=f"{__name__}:order"), "spec.data.options", "DataUnreadable"),
        (Data(name="digits", path="/missing"), "spec.data.path", "InvalidSpec"),
        (Data(name="text", path="/missing"), "spec.data.path", "DataUnreadable"),
        (Data(name="text", options={"lenght": 3}), "spec.data.options", "DataUnreadable"),
        (Data(name="text", options={"task": "Words"}), "spec.data.options.task", "InvalidSpec"),
        (Data(name="text", options={"packages": ["this"]}), "spec.data.options", "DataUnreadable"),
        (Data(name="text", options={"length": 10**9}), "spec.data.options", "DataUnreadable"),
    ],
)
def test_data_that_cannot_be_used_name_the_field(data: Data, field: str, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_dataset(data, dtype=torch.float32)
    assert (caught.value.field, caught.value.reason) == (field, reason)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: None, "returned a NoneType for 3 samples"),
        (lambda x: x, r"returned a tensor \(3, 1\) for 3"),
        (lambda x: (x, x, x), r"returned a tensor .* and a tensor .* and a tensor .* for 3"),
        (lambda x: (x.numpy(), x.tolist()), "returned a ndarray and a list for 3"),
        (lambda x: ({"input_ids": x}, x), r"returned a dict and a tensor \(3, 1\) for 3"),
        (lambda x: (x[:2], x), r"a tensor \(2, 1\) and .* for 3 samples, not two tensors \(3, \.\.\.\)"),
        (lambda x: (x, x.sum()), r"and a tensor \(\) for 3"),
    ],
)
def test_a_split_that_returns_something_else_is_refused(function: Callable[[Tensor], Any], words: str) -> None:
    class Broken(TensorSplit):
        def batch(self, ids: Sequence[int]) -> Any:
            return function(self.inputs[list(ids)])

        def augmented_batch(self, ids: Sequence[int], step: int) -> Any:
            return self.batch(ids)

        def augmentation_key(self, sample_id: int, step: int) -> None: ...

    for step in (None, 3):
        message = f"one of the samples 1, 0, 2 cannot be read: TypeError: .*{words}"
        with pytest.raises(SpecError, match=message) as refused:
            read_batch(Broken(torch.zeros(4, 1), torch.zeros(4)), [1, 0, 2], step)
        assert refused.value.reason == "DataUnreadable"


class Failing(TensorSplit):
    """Raises these errors in turn, and then reads."""

    failures: list[Exception]

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        if self.failures:
            raise self.failures.pop(0)
        return super().batch(ids)

    def augmented_batch(self, ids: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
        return self.batch(ids)

    def augmentation_key(self, sample_id: int, step: int) -> int:
        return 0

    def lengths(self, ids: Sequence[int]) -> Tensor:
        return self.batch(ids)[1]


def failing(*failures: Exception) -> Failing:
    split = Failing(torch.zeros(4, 1), torch.ones(4, dtype=torch.long))
    vars(split)["failures"] = list(failures)
    return split


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts are left out. Returns those that were asked for."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    return pauses


STALE = OSError(errno.ESTALE, "Stale file handle")


def test_samples_are_read_again_after_an_error_that_passes(
    no_pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    errors = STALE, OSError(errno.EIO, "I/O"), ConnectionResetError("reset by peer"), TimeoutError("no answer")
    info = DataInfo((4,), 1, lengths=(1, 4))
    reads: list[Callable[[Failing], object]] = [
        lambda split: read_batch(split, [2], None),
        lambda split: read_batch(split, [2], 3),
        lambda split: lengths_of(split, [2], torch.device("cpu")),
        lambda split: padded_lengths(split, info)([2]),  # type: ignore[misc]
    ]
    for read in reads:
        assert str(read(failing(*errors))) == str(read(failing()))
    assert no_pauses == [0.5, 1, 2, 4] * len(reads)
    assert "data: OSError: [Errno 116] Stale file handle; trying again" in caplog.text


def test_an_error_of_a_sample_that_stays_ends_the_job_before_other_workers_give_up(no_pauses: list[float]) -> None:
    split = failing(*[STALE] * 100)
    with pytest.raises(SpecError, match=r"samples 1 cannot be read: OSError: .* Stale file handle") as error:
        read_batch(split, [1], None)
    assert error.value.reason == "DataUnreadable" and isinstance(error.value.__cause__, OSError)
    assert len(split.failures) == 94 and 10 < sum(no_pauses) < FLOOR_SECONDS / 1.5


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(errno.ENOENT, "no such file"), OSError("image file is truncated"), ValueError("no size")],
)
def test_an_error_of_a_sample_that_does_not_pass_ends_the_job_at_once(error: Exception, no_pauses: list[float]) -> None:
    split = failing(error, STALE)
    with pytest.raises(SpecError, match=re.escape(str(error))):
        read_batch(split, [1], None)
    assert split.failures == [STALE] and no_pauses == []


ATTEMPTS: list[None] = []


def load_at_the_second_attempt(path: str, dtype: torch.dtype) -> Dataset:
    ATTEMPTS.append(None)
    if len(ATTEMPTS) == 1:
        raise STALE
    return tiny(path, dtype)


def test_a_dataset_is_loaded_again_after_an_error_that_passes(no_pauses: list[float]) -> None:
    ATTEMPTS.clear()
    data = Data(name=f"{__name__}:load_at_the_second_attempt")
    assert len(load_dataset(data, dtype=torch.float32).train) == 4
    assert len(ATTEMPTS) == 2 and len(no_pauses) == 1


class Broken(torch.utils.data.Dataset[Any]):
    """Fails at its first sample, or at its number of samples."""

    def __init__(self, at: str) -> None:
        self._at = at

    def __len__(self) -> int:
        if self._at == "length":
            raise OSError("gone")
        return 4

    def __getitem__(self, index: int) -> Any:
        raise OSError("gone")


@pytest.mark.parametrize(
    ("at", "words"), [("sample", "data: sample 0: OSError: gone"), ("length", "data: cannot be read: OSError: gone")]
)
def test_an_error_of_the_programs_data_names_a_sample_only_if_it_read_one(at: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        script_dataset((Broken(at), Broken("sample")), dtype=torch.float32)
    assert str(refused.value) == words and refused.value.reason == "DataUnreadable"


def test_samples_that_are_not_in_host_memory_are_refused() -> None:
    for inputs, targets in (("meta", "cpu"), ("cpu", "meta")):
        split = TensorSplit(torch.zeros(4, 1, device=inputs), torch.zeros(4, device=targets))
        with pytest.raises(SpecError, match=f"tensors on {inputs} and {targets}: keep them on the CPU"):
            read_batch(split, [1], None)


def test_a_dataset_refuses_parts_of_other_types() -> None:
    split, info = TensorSplit(torch.zeros(4, 1), torch.zeros(4)), DataInfo((1,), 1)
    parts: list[tuple[Any, Any, Any]] = [(split, None, info), ([1, 2], split, info), (split, split, (1,))]
    for part, words in zip(parts, ["test is a NoneType", "train is a list", "info is a tuple"], strict=True):
        with pytest.raises(TypeError, match=words):
            Dataset(*part)


def test_inputs_that_are_augmented_at_random_are_noticed() -> None:
    class Flipped(TensorSplit):
        def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
            inputs, targets = super().batch(ids)
            return torch.where(torch.rand(len(inputs), 1) < 0.5, inputs, inputs.flip(-1)), targets

    plain = TensorSplit(torch.randn(40, 3), torch.arange(40))
    flipped = Flipped(plain.inputs, plain.targets)
    info = DataInfo((3,), 40)

    assert not Dataset(plain, plain, info).inputs_change
    assert Dataset(flipped, plain, info).inputs_change
    assert Dataset(plain, flipped, info).inputs_change


def test_missing_values_do_not_count_as_inputs_that_change() -> None:
    class Forgetful(TensorSplit):
        def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
            inputs, targets = super().batch(ids)
            return torch.where(torch.rand(len(inputs), 1) < 0.5, inputs, torch.nan), targets

    gaps = TensorSplit(torch.tensor([[1.0, torch.nan], [torch.nan, 2.0]]), torch.arange(2))
    numbers = TensorSplit(torch.ones(40, 3), torch.arange(40))
    assert not Dataset(gaps, gaps, DataInfo((2,), 2)).inputs_change
    assert Dataset(Forgetful(numbers.inputs, numbers.targets), gaps, DataInfo((3,), 40)).inputs_change


def test_a_class_that_only_held_out_samples_have_counts() -> None:
    def of(*classes: int) -> TensorDataset:
        return TensorDataset(torch.zeros(len(classes), 1), torch.tensor(classes, dtype=torch.int64))

    assert script_dataset((of(0, 1), of(2)), dtype=torch.float32).info.num_classes == 3
    assert script_dataset((of(0, 3), of()), dtype=torch.float32).info.num_classes == 4


def test_named_classes_with_other_numbers_in_the_held_out_samples_are_refused() -> None:
    class Folder(TensorDataset):
        def __init__(self, *classes: str) -> None:
            super().__init__(torch.zeros(2, 1), torch.tensor([0, 0]))
            self.classes = list(classes)

    with pytest.raises(SpecError, match='class 1 is "dog" in the training samples, but "eel" in the held-out ones'):
        script_dataset((Folder("cat", "dog", "eel"), Folder("cat", "eel")), dtype=torch.float32)
    with pytest.raises(SpecError, match=r'the held-out samples have the class "eel" .* training samples have only 2'):
        script_dataset((Folder("cat", "dog"), Folder("cat", "dog", "eel")), dtype=torch.float32)
    info = script_dataset((Folder("cat", "dog", "eel"), Folder("cat", "dog")), dtype=torch.float32).info
    assert info.labels == ("cat", "dog", "eel")


def test_samples_of_unequal_shapes_are_refused_with_both_shapes() -> None:
    samples = [(torch.zeros(4 if number < 20 else 5), 0) for number in range(64)]
    split = script_dataset((samples, samples), dtype=torch.float32).train

    words = r"samples 18 and 20 have inputs of shapes \(4,\) and \(5,\): pad or crop them"
    with pytest.raises(SpecError, match=words):
        read_batch(split, [18, 19, 20], None)


def test_the_number_of_a_variant_is_a_plain_number_and_its_errors_are_those_of_a_sample() -> None:
    class Numbered(TensorSplit):
        def augmented_batch(self, ids: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
            return self.batch(ids)

        def augmentation_key(self, sample_id: int, step: int) -> Any:
            if step == 0:
                raise OSError("the volume is gone")
            return (None, np.int64(step), torch.tensor(step), 0.5)[sample_id]

    split = Numbered(torch.zeros(4, 1), torch.zeros(4))
    assert [json.dumps(augmentation_key(split, sample, 7)) for sample in range(3)] == ["null", "7", "7"]
    for step, words in ((0, "OSError: the volume is gone"), (7, "TypeError: 'float' object cannot be interpreted")):
        with pytest.raises(SpecError, match=f"one of the samples 3 cannot be read: {words}") as refused:
            augmentation_key(split, 3, step)
        assert refused.value.reason == "DataUnreadable"


def test_a_sample_as_it_is_shares_no_cached_activation_with_its_variants() -> None:
    class Mirrored(TensorSplit):
        def augmented_batch(self, ids: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
            inputs, targets = self.batch(ids)
            return inputs.flip(-1), targets

        def augmentation_key(self, sample_id: int, step: int) -> int:
            return 0

    plain = TensorSplit(torch.randn(4, 3), torch.arange(4))
    mirrored = Mirrored(plain.inputs, plain.targets)

    assert augmentation_key(plain, 2, None) == augmentation_key(plain, 2, 5) == 0, "which probe and training share"
    assert augmentation_key(mirrored, 2, None) != augmentation_key(mirrored, 2, 5) == 0


def test_text_of_the_library_is_packed_without_a_gap() -> None:
    dataset = load_dataset(Data(name="text", options={"length": 32, "packages": ["json"]}), dtype=torch.float32)
    assert dataset.info == DataInfo((32,), 259, 259, task=Task.NEXT_TOKEN, **BYTES)
    inputs, targets = dataset.train.batch([0, 1])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert targets[0, -1] == inputs[1, 0]
    assert bytes(i - 3 for i in inputs.flatten().tolist() if i > 2).decode().startswith(":mod:`json` exposes")
    assert lengths_of(dataset.train, [0], torch.device("cpu")) is None


def text_of(folder: Path, content: bytes, **options: Any) -> Dataset:
    (folder / "a.txt").write_bytes(content)
    return load_dataset(Data(name="text", path=str(folder), options=options), dtype=torch.float32)


def test_one_long_document_is_packed_and_held_out_in_pages(tmp_path: Path) -> None:
    dataset = text_of(tmp_path, b"a sentence of some words\n" * 4000, length=32)
    train, test = len(dataset.train), len(dataset.test)
    assert (train + test) * 32 == pytest.approx(25 * 4000, rel=0.01)
    assert test / (train + test) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"one paragraph of a few words, and no other one",
            r"too few paragraphs \(1\): the first is held out. Blank lines separate paragraphs",
        ),
        ("caf\xe9 ".encode("latin-1") * 100, r"a\.txt is not UTF-8 text: .* byte 0xe9 in position 3"),
    ],
)
def test_text_that_cannot_be_used_says_why(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        text_of(tmp_path, content)


def test_masked_text_hides_other_positions_at_every_step_and_asks_for_what_was_there() -> None:
    options = {"length": 64, "packages": ["json"]}
    plain = load_dataset(Data(name="text", options=options), dtype=torch.float32)
    dataset = load_dataset(Data(name="text", options={**options, "task": "MaskedToken"}), dtype=torch.float32)
    assert dataset.info == DataInfo((64,), 260, 260, task=Task.MASKED_TOKEN, **BYTES)
    ids = range(len(dataset.train))
    tokens = plain.train.batch(ids)[0]
    inputs, targets = read_batch(dataset.train, ids, 3)
    chosen = targets != -100
    assert torch.equal(targets[chosen], tokens[chosen]) and torch.equal(inputs[~chosen], tokens[~chosen])
    assert 0.1 < chosen.double().mean() < 0.2
    assert 0.7 < (inputs[chosen] == 259).double().mean() < 0.9
    assert 0.07 < (inputs[chosen] == tokens[chosen]).double().mean() < 0.13, "and as many hold another token"
    assert not torch.equal(chosen[0], chosen[1])
    assert torch.equal(read_batch(dataset.train, ids[2:4], 3)[0], inputs[2:4])
    assert not torch.equal(read_batch(dataset.train, ids, 4)[0], inputs)


def test_text_of_the_library_is_classified_by_package() -> None:
    options = {"task": "Class", "length": 64, "packages": ["json", "logging"]}
    dataset = load_dataset(Data(name="text", options=options), dtype=torch.float32)
    assert dataset.info == DataInfo((64,), 2, 259, task=Task.CLASS, labels=("json", "logging"), **BYTES)
    for split in (dataset.train, dataset.test):
        ids = range(len(split))
        inputs, targets = split.batch(ids)
        lengths = lengths_of(split, ids, torch.device("cpu"))
        assert lengths is not None
        assert ((inputs != 0).sum(dim=1) == lengths).all() and lengths.min() >= 40
        assert targets.bincount().min() > 5
    assert 3.5 <= len(dataset.train) / len(dataset.test) <= 4


def test_text_comes_from_a_folder_too(tmp_path: Path) -> None:
    for name, word in (("b/one.txt", "spam "), ("a/two.md", "eggs ")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("\n\n".join([word * 10] * 10))
    dataset = load_dataset(Data(name="text", path=str(tmp_path), options={"task": "Class"}), dtype=torch.float32)
    assert dataset.test.batch(range(len(dataset.test)))[1].tolist() == [0, 0, 1, 1]
    assert bytes(i - 3 for i in dataset.test.batch([0])[0][0, 1:5].tolist()) == b"eggs"


def test_hidden_files_of_a_folder_are_no_texts(tmp_path: Path) -> None:
    text = "\n\n".join(["eggs and spam " * 5] * 10)
    for name in ("..2026_11_28/a.txt", ".git/notes.md", "a.txt", "b/.draft.md", "b/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "..data").symlink_to("..2026_11_28")
    dataset = load_dataset(Data(name="text", path=str(tmp_path), options={"task": "Class"}), dtype=torch.float32)
    assert dataset.info.labels == (".", "b") and len(dataset.train) + len(dataset.test) == 20


class LastOfRow(TensorSplit):
    """Its targets have a stride."""

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = super().batch(ids)
        return inputs, targets[:, -1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_targets_of_any_type_have_a_digest(dtype: torch.dtype) -> None:
    inputs, ones, zeros = torch.zeros(4, 1), torch.ones(4, 3, dtype=dtype), torch.zeros(4, 3, dtype=dtype)
    assert digest(TensorSplit(inputs, ones)) == digest(TensorSplit(inputs, ones.clone()))
    assert digest(TensorSplit(inputs, ones)) != digest(TensorSplit(inputs, zeros))
    assert digest(LastOfRow(inputs, ones)) == digest(TensorSplit(inputs, ones[:, -1]))


class DrawnInputs(TensorSplit):
    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = super().batch(ids)
        return torch.rand_like(inputs), targets


class DrawnTargets(TensorSplit):
    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = super().batch(ids)
        return inputs, torch.rand_like(targets)


def test_targets_that_change_are_refused_where_two_stages_read_them() -> None:
    info, tensors = DataInfo((3,), 2), (torch.zeros(4, 3), torch.zeros(4))
    fixed, inputs, targets = TensorSplit(*tensors), DrawnInputs(*tensors), DrawnTargets(*tensors)

    for dataset in (Dataset(targets, fixed, info), Dataset(fixed, targets, info)):
        assert (dataset.inputs_change, dataset.targets_change) == (False, True)
        check_targets(Pipeline(stages=1), dataset)
        with pytest.raises(SpecError, match=r"spec\.data: targets change"):
            check_targets(Pipeline(stages=2), dataset)

    for dataset in (Dataset(inputs, fixed, info), Dataset(fixed, inputs, info)):
        assert (dataset.inputs_change, dataset.targets_change) == (True, False)
        check_targets(Pipeline(stages=2), dataset)


def test_a_digest_is_of_targets_from_all_over_the_split() -> None:
    inputs, targets = torch.zeros(100, 1), torch.zeros(100)
    changed = targets.clone()
    changed[96] = 1
    assert digest(TensorSplit(inputs, targets)) != digest(TensorSplit(inputs, changed))


def test_facts_about_data_are_plain_values_whatever_they_come_from() -> None:
    given: dict[str, Any] = {
        "input_shape": [np.int64(3)], "num_classes": torch.tensor([0, 1]).max() + 1, "labels": ["cat", "dog"],
        "lengths": [1, 3], "pad_id": np.int32(0),
    }  # fmt: skip
    info, plain = DataInfo(**given), DataInfo((3,), 2, labels=("cat", "dog"), lengths=(1, 3), pad_id=0)
    assert info == plain and hash(info) == hash(plain)
    assert {type(each) for each in (info.num_classes, info.pad_id, *info.input_shape)} == {int}
    with pytest.raises(ValueError, match="2 labels for 3 classes"):
        DataInfo((3,), 3, labels=("cat", "dog"))
    for lengths in ((3, 1), (1, 3, 3), (1, 2), (1, 2, 4)):  # samples would be cut, or take the wrong length
        with pytest.raises(ValueError, match="they must ascend to that of input_shape"):
            DataInfo((3,), 2, lengths=lengths)


def test_short_texts_of_a_class_count_and_a_class_without_training_text_is_refused(tmp_path: Path) -> None:
    for name, number in (("good", 10), ("bad", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("\n\n".join(["fine"] * number))
    data = Data(name="text", path=str(tmp_path), options={"task": "Class"})
    dataset = load_dataset(data, dtype=torch.float32)
    assert dataset.train.batch(range(len(dataset.train)))[1].bincount().tolist() == [4, 8]
    (tmp_path / "bad" / "a.txt").write_text("only one")
    with pytest.raises(SpecError, match="the class bad has no training text: of its paragraphs the first is held out"):
        load_dataset(data, dtype=torch.float32)
