"""What holds for the tests of the trainer."""

from collections.abc import Iterator

import pytest

from tests.testkit.trainer.undrawn import undrawn


@pytest.fixture(autouse=True)
def picture() -> Iterator[None]:
    """Only the tests of the record draw one."""
    with undrawn():
        yield
