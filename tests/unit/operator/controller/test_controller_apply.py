"""What the controller does with each part of a plan, and what it tells of errors."""

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta

import pytest

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_operator.controller.apply import Applier
from pipetransformer_operator.controller.ports import Refused, Unavailable
from pipetransformer_operator.controller.refused_deletions import RefusedDeletions
from pipetransformer_operator.controller.slots import Slots
from pipetransformer_operator.plan import Deletion, DisruptionBudget, Plan
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.controller import KEY, NOW
from tests.testkit.operator.shared_cluster import Cluster


class Nodes(Cluster):
    """Keeps what it hears of nodes, and fails as it is told to."""

    def __init__(self) -> None:
        super().__init__(4, make_job().job())
        self.heard: list[object] = []
        self.failures: dict[str, Exception] = {}

    @property
    def job(self) -> PipeTrainingJob:
        return self.jobs[KEY]

    def applier(self) -> Applier:
        return Applier(KEY, self, self, Slots(1), None, RefusedDeletions(1.0, 5.0))

    def doubt(self, job: PipeTrainingJob, silent: Mapping[str, datetime], unfit: Mapping[str, datetime]) -> None:
        self.heard += [dict(silent), dict(unfit)]

    def blame(self, failed_devices: Mapping[str, str]) -> None:
        self.heard.append(dict(failed_devices))

    async def protect(self, job: PipeTrainingJob, budget: DisruptionBudget | None) -> None:
        if "protect" in self.failures:
            raise self.failures["protect"]

    async def delete(self, job: PipeTrainingJob, name: str = "", uid: str = "") -> None:
        if name in self.failures:
            raise self.failures[name]


async def test_the_pool_hears_which_nodes_are_in_doubt_which_are_unfit_and_which_accelerators_broke() -> None:
    cluster = Nodes()
    later = NOW + timedelta(minutes=5)
    plan = Plan(cluster.job.status, doubted={"silent": later}, unfit={"full": later}, failed_devices={"uid-1": "worn"})

    await cluster.applier().apply(cluster.job, plan)

    assert cluster.heard == [{"silent": later}, {"full": later}, {"uid-1": "worn"}]


async def test_of_two_errors_in_a_turn_one_is_raised_and_the_other_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Nodes()
    cluster.failures = {"protect": Unavailable("503 budget"), "digits-w7": Unavailable("503 pod")}
    plan = Plan(cluster.job.status, delete=(Deletion(7, "digits-w7", "uid-7", "why"),))

    with pytest.raises(Unavailable, match="503 budget"):
        await cluster.applier().apply(cluster.job, plan)

    assert [(one.levelno, one.message) for one in caplog.records] == [
        (logging.WARNING, "default/digits: another error in the same turn: Unavailable('503 pod')")
    ]


async def test_a_refused_deletion_is_logged_and_asks_for_another_turn_because_the_status_must_say_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Nodes()
    cluster.failures = {"digits-w7": Refused("a policy keeps it")}
    applier = cluster.applier()
    plan = Plan(cluster.job.status, delete=(Deletion(7, "digits-w7", "uid-7", "why"),))

    assert await applier.apply(cluster.job, plan), "the next plan names the refusal"
    assert not await applier.apply(cluster.job, plan), "nothing has changed since"

    assert [one.message for one in caplog.records] == [
        "default/digits: cannot delete a worker: a policy keeps it; trying again in 1 s"
    ]


async def test_a_deletion_that_passes_at_last_is_forgotten_at_once() -> None:
    cluster = Nodes()
    cluster.failures = {"digits-w7": Refused("a policy keeps it")}
    deletions = RefusedDeletions(0.0, 0.0)
    applier = Applier(KEY, cluster, cluster, Slots(1), None, deletions)
    plan = Plan(cluster.job.status, delete=(Deletion(7, "digits-w7", "uid-7", "why"),))
    await applier.apply(cluster.job, plan)
    cluster.failures.clear()

    assert await applier.apply(cluster.job, plan), "the next plan no longer names it"
    assert deletions.explanations == {}
