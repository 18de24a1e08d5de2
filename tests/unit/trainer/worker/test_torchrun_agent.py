"""The agent's rendezvous, without torchrun."""

import datetime
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipetransformer.elastic.generations.rendezvous import host_store
from pipetransformer.elastic.transport.groups import PrefixStore
from pipetransformer.worker.torchrun_agent import GENERATION, AgentRendezvousHandler
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from tests.testkit.trainer.storing import until

pytestmark = pytest.mark.timeout(60)


class Replacing:
    """A source that replaces the generation 1 of the members a and b by the generation 2 of a once `b_is_lost`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.b_is_lost = threading.Event()

    def next_generation(self, after: int) -> Generation:
        if after == 1:
            self.b_is_lost.wait()
        elif after > 1:
            threading.Event().wait()
        names = "a" if self.b_is_lost.is_set() else "ab"
        return Generation(
            job_uid="uid",
            layout_generation=after + 1,
            stages=1,
            pipelines=len(names),
            members=[Member(name=name, uid=name, address=self._address) for name in names],
            leavers=[],
            leader="a",
            nonce="nonce",
            reason=ResizeReason.FAILURE,
        )

    def newest(self) -> int:
        return 0

    def close(self) -> None:
        pass


def test_an_agent_waits_for_no_participant_of_a_generation_that_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GENERATION, "")
    store, address = host_store("127.0.0.1", datetime.timedelta(seconds=10))
    source = Replacing(address)
    agent = AgentRendezvousHandler("a", store, source, timeout=datetime.timedelta(seconds=600))
    with ThreadPoolExecutor() as threads:
        meets = threads.submit(agent.next_rendezvous)
        until(lambda: PrefixStore("uid/1/nonce", store).check(["here/a"]))
        assert agent.num_nodes_waiting() == 0

        source.b_is_lost.set()

        assert meets.result(20).world_size == 1
    assert Generation.model_validate_json(os.environ[GENERATION]).layout_generation == 2
    assert agent.num_nodes_waiting() == 0
