"""A folder whose marker is damaged holds no checkpoint."""

from pathlib import Path

import pytest

from pipetransformer.storage.store import MARKER, latest


@pytest.mark.parametrize("content", ["", "[]", "3", '{"files": []}', '{"files": 3}', '{"files": {}}'])
def test_a_marker_that_is_not_of_a_checkpoint_is_ignored_with_a_warning(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "step-000000000005-g3"
    folder.mkdir()
    (folder / MARKER).write_text(content)

    assert latest(str(tmp_path)) is None
    assert f"{MARKER} is damaged" in caplog.text
