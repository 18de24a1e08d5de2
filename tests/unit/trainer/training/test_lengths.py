"""Padded samples of a few lengths: each length is one static stage, and nothing that is computed changes."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.data import DataInfo, EpochOrder, deal, load_dataset, padded_lengths
from pipetransformer.data.dataset import lengths_of
from pipetransformer.errors import SpecError
from pipetransformer_contract.spec import Data, TrainerSpec
from tests.testkit.trainer.harness import Ran, Scripted, run_job

LENGTHS = [56, 72, 96]
TEXT = {"packages": ["json", "dbm"], "task": "Class"}
SAMPLES_OF_STEP = 16


def make_spec(length: object) -> TrainerSpec:
    """A small BERT in float64, two of its three layers frozen after a few steps and read from the cache."""
    return TrainerSpec.model_validate(
        {
            "model": {
                "name": "huggingface",
                "numLayers": 3,
                "options": {
                    "model_type": "bert",
                    "hidden_size": 16,
                    "num_attention_heads": 2,
                    "intermediate_size": 32,
                    "attention_probs_dropout_prob": 0.0,
                    "hidden_dropout_prob": 0.0,
                },
            },
            "data": {"name": "text", "options": {**TEXT, "length": length}},
            "training": {"epochs": 2, "globalBatchSize": SAMPLES_OF_STEP, "precision": "Float64"},
            "freeze": {"policy": "Explicit", "boundaries": [{"step": 2, "boundary": 1}, {"step": 5, "boundary": 2}]},
            "pipeline": {"stages": 2, "microBatchSize": 3},
            "cache": {"policy": "Always"},
            "numShards": 2,
            "workers": 2,
        }
    )


@pytest.fixture(scope="module")
def one_length(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_job(make_spec(LENGTHS[-1]), [Scripted(1, 1, [0])], tmp_path_factory.mktemp("one"))


@pytest.mark.timeout(240)
def test_several_lengths_compute_what_one_does_in_every_layout(one_length: Ran, tmp_path: Path) -> None:
    script = [Scripted(2, 1, [0, 1]), Scripted(1, 2, [1, 0], at_step=3), Scripted(1, 1, [0], at_step=8, leavers=[1])]

    run = run_job(make_spec(LENGTHS), script, tmp_path)

    assert len(run.summary["generations"]) == 3
    assert (run.summary["samples_lost"], run.summary["samples_repeated"]) == (0, 0)
    assert sum(entry["hits"] for entry in run.summary["cache"]) > 0
    for ours, theirs in zip(run.steps, one_length.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9), ours["step"]
        assert ours["gradientNorm"] == pytest.approx(theirs["gradientNorm"], rel=1e-9), ours["step"]
    assert run.summary["test_accuracy"] == one_length.summary["test_accuracy"]


@given(
    used=st.lists(st.integers(1, LENGTHS[-1]), min_size=4, max_size=40),
    pipelines=st.integers(1, 4),
    micro_batch_size=st.integers(1, 7),
)
def test_every_sample_is_dealt_once_in_a_micro_batch_of_its_length(
    used: list[int], pipelines: int, micro_batch_size: int
) -> None:
    order = EpochOrder(seed=0, num_samples=len(used), global_batch=len(used), num_shards=4)

    def shortest(ids: object) -> list[int]:
        return [next(length for length in LENGTHS if length >= used[sample]) for sample in ids]  # type: ignore[attr-defined]

    dealt = deal(order.batch(0), pipelines, micro_batch_size, shortest)

    real = Counter(sample for mine in dealt for micro_batch in mine for sample in micro_batch.real_ids)
    assert real == Counter(range(len(used)))
    for mine in dealt:
        assert mine, "its stages run in step with the others"
        assert [m.length for m in mine] == sorted(m.length for m in mine if m.length is not None)
        for micro_batch in mine:
            assert len(micro_batch.sample_ids) == micro_batch_size
            assert set(shortest(micro_batch.sample_ids)) == {micro_batch.length}


def test_a_padded_sample_gets_the_shortest_length_that_it_fits() -> None:
    dataset = load_dataset(Data(name="text", options={**TEXT, "length": [96, 56, 72]}), dtype=None)  # type: ignore[arg-type]
    lengths = padded_lengths(dataset.train, dataset.info)

    assert lengths is not None
    found = lengths(range(len(dataset.train)))
    used = dataset.train.lengths(range(len(dataset.train))).tolist()  # type: ignore[attr-defined]
    assert set(found) == set(LENGTHS)
    assert all(
        short >= n and not any(n <= other < short for other in LENGTHS) for short, n in zip(found, used, strict=True)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "NextToken", "length": [16, 32]}, "packed samples have one length"),
        ({"task": "Class", "length": []}, r"length is \[\]: it must be a positive number of tokens, or a list"),
        ({"task": "Class", "length": [16, 0]}, r"length is \[16, 0\]: it must be"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_dataset(Data.model_validate({"name": "text", "options": {"packages": ["json"], **options}}), dtype=None)  # type: ignore[arg-type]


class Padded:
    """Three samples of six positions, whose split says these lengths."""

    def __init__(self, says: object) -> None:
        self._says = says

    def __len__(self) -> int:
        return 3

    def batch(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(ids), 6), torch.zeros(len(ids), dtype=torch.long)

    def lengths(self, ids: Sequence[int]) -> Any:
        return self._says


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ([1, 2, 3], r"lengths returned list for 3 samples, not a tensor \(3,\) of whole numbers"),
        (torch.tensor([1, 2]), r"lengths returned a tensor \(2,\) of torch.int64 for 3 samples"),
        (torch.tensor([1.0, 2.0, 3.0]), r"a tensor \(3,\) of torch.float32 for 3 samples"),
        (torch.tensor([1, 0, 3]), "a length is below 1"),
    ],
)
def test_lengths_of_a_split_that_are_none_are_refused(says: object, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        lengths_of(Padded(says), [0, 1, 2], torch.device("cpu"))


def test_a_length_beyond_the_longest_is_refused() -> None:
    lengths = padded_lengths(Padded(torch.tensor([1, 7, 3])), DataInfo((6,), 2, lengths=(3, 6)))
    assert lengths is not None
    with pytest.raises(SpecError, match="a length is 7, but samples have 6 positions"):
        lengths([0, 1, 2])
