"""Which worker holds which units, whatever span of the model they are in."""

import pytest

from pipetransformer.partition import Cut
from pipetransformer.state.layout import StageLayout
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from pipetransformer_contract.spec import ScheduleName

SPANS = [range(3), range(3, 5), range(5, 7), range(7, 10)]


def layout(rank: int, owners: tuple[int, ...]) -> StageLayout:
    """Two pipelines of two workers; the workers of the second have their roles the other way round."""
    members = [Member(name=f"w{number}", uid="u", address="127.0.0.1:1") for number in range(4)]
    generation = Generation(
        job_uid="job", layout_generation=1, stages=2, pipelines=2, members=members, leader="w2", nonce="n",
        reason=ResizeReason.START,
    )  # fmt: skip
    cut = Cut(SPANS, 4, owners, ScheduleName.INTERLEAVED)
    return StageLayout(generation, rank, [(0, 0), (0, 1), (1, 1), (1, 0)], cut)


@pytest.mark.parametrize(
    ("owners", "units", "first", "last"),
    [
        ((0, 1, 0, 1), [[0, 1, 2, 5, 6], [3, 4, 7, 8, 9]], [True, False], [False, True]),
        ((0, 1, 1, 0), [[0, 1, 2, 7, 8, 9], [3, 4, 5, 6]], [True, False], [True, False]),
    ],
    ids=["round", "there-and-back"],
)
def test_the_ends_of_the_model_are_where_their_spans_are(
    owners: tuple[int, ...], units: list[list[int]], first: list[bool], last: list[bool]
) -> None:
    own = [layout(rank, owners) for rank in (0, 1)]

    assert [one.units for one in own] == units
    assert [one.is_first for one in own] == first
    assert [one.is_last for one in own] == last


def test_the_holder_of_a_unit_is_found_in_each_pipeline() -> None:
    here = layout(0, (0, 1, 0, 1))

    assert [here.holder(0, unit) for unit in (0, 3, 6, 9)] == [0, 1, 0, 1]
    assert [here.holder(1, unit) for unit in (0, 3, 6, 9)] == [3, 2, 3, 2]


def test_any_member_may_lead() -> None:
    assert [layout(rank, (0, 1, 0, 1)).is_leader for rank in range(4)] == [False, False, True, False]
    assert layout(0, (0, 1, 0, 1)).leader_rank == 2
