"""Fixtures of the client's tests."""

import pytest

from pipetransformer_client.kube import Kube
from tests.testkit.client.fake_kube import FakeKube


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeKube:
    """The cluster to which every command connects."""
    cluster = FakeKube()
    monkeypatch.setattr(Kube, "connect", lambda context=None: cluster.kube)
    return cluster
