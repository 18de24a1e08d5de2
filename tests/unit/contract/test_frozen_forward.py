"""`pipeline.frozenForward` goes with the fields that it depends on, or the job is refused."""

import pytest
from pydantic import ValidationError

from pipetransformer_contract.spec import FrozenForward, Pipeline


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ({"frozenForward": "Auto"}, "frozenForward Auto needs packing Measured"),
        ({"frozenForward": "Ahead", "schedule": "TeraPipe"}, "need another schedule than TeraPipe"),
        ({"frozenForward": "Ahead", "schedule": "Script"}, "need another schedule than TeraPipe"),
        ({"frozenForward": "Auto", "schedule": "Script", "packing": "Measured"}, "need another schedule than TeraPipe"),
        ({"frozenForward": "Behind"}, "InPlace"),
    ],
)
def test_what_cannot_run_ahead_is_refused(pipeline: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Pipeline.model_validate(pipeline)


def test_frozen_layers_compute_in_place_unless_the_job_says_otherwise() -> None:
    assert Pipeline().frozen_forward is FrozenForward.IN_PLACE
    assert Pipeline.model_validate({"frozenForward": "Ahead", "schedule": "Interleaved"})
    assert Pipeline.model_validate({"frozenForward": "Auto", "schedule": "Auto", "packing": "Measured"})
