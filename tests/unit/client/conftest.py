"""The cluster of every command."""

import pytest

from pipetransformer_client.kube import Kube
from tests.testkit.client.fake_kube import FakeKube


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeKube:
    """What every command connects to."""
    cluster = FakeKube()
    monkeypatch.setattr(Kube, "connect", lambda context=None: cluster.kube)
    return cluster
