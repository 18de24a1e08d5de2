"""What a Workload's conditions mean, and what is written back to it."""

import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from pipetransformer_contract.api.labels import JOB_LABEL, JOB_UID_LABEL, PRIORITY_CLASS_LABEL, QUEUE_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_contract.api.status import QuotaRequest
from pipetransformer_contract.messages import Generation, Member, ResizeReason
from pipetransformer_operator.kube.workers.rendering import owner_reference
from pipetransformer_operator.kueue import workload as workloads
from tests.testkit.operator.builders import make_job

NOW = datetime(2026, 1, 1, tzinfo=UTC)
REQUEST = QuotaRequest(name="digits-q3", queue="team-a", workers=4, admitted=True, worker_ids=[0, 1])


def workload(*conditions: tuple[str, str], **status: Any) -> Object:
    """A Workload of REQUEST with these conditions; each says its type as its message."""
    found = [{"type": kind, "status": value, "reason": "Why", "message": kind} for kind, value in conditions]
    body = workloads.render(make_job().job(), REQUEST, claimed=False, class_value=None)
    body["metadata"] |= {"uid": "q3", "resourceVersion": "7"}
    return {**body, "status": {"conditions": found, **status}}


@pytest.mark.parametrize(
    ("conditions", "admitted", "message"),
    [
        ((), False, ""),
        ((("QuotaReserved", "False"),), False, "QuotaReserved"),
        ((("QuotaReserved", "True"), ("Admitted", "False")), False, ""),
        ((("QuotaReserved", "True"), ("Admitted", "True")), True, ""),
        ((("QuotaReserved", "True"), ("Admitted", "True"), ("Evicted", "False")), True, ""),
        ((("QuotaReserved", "True"), ("Admitted", "True"), ("Evicted", "True")), False, "Evicted"),
        ((("QuotaReserved", "False"), ("Admitted", "False"), ("Evicted", "True")), False, "QuotaReserved"),
    ],
    ids=["new", "pending", "reserved", "admitted", "readmitted", "evicted", "waits again"],
)
def test_a_workload_is_admitted_unless_its_quota_is_wanted_back(
    conditions: tuple[tuple[str, str], ...], admitted: bool, message: str
) -> None:
    answer = workloads.answer(workload(*conditions))
    assert (answer.admitted, answer.message, answer.withdrawn) == (admitted, message, False)


def test_who_was_evicted_reads_first_why_and_then_what_the_queue_waits_for() -> None:
    found = workload(("QuotaReserved", "True"), ("Admitted", "True"), ("Evicted", "True"), admission={"x": 1})
    conditions = workloads.requeued(found, REQUEST, NOW)["status"]["conditions"]
    found["status"] |= {"conditions": conditions, "admission": None}
    assert not workloads.is_evicted(found), "its quota is given back once"
    assert workloads.answer(found).message == "Evicted"
    next(one for one in conditions if one["type"] == "QuotaReserved")["message"] = "insufficient unused quota"
    assert workloads.answer(found).message == "insufficient unused quota"
    found["spec"]["active"] = False
    assert workloads.answer(found).message == "Evicted", "the queue does not look at it"


def test_who_has_its_quota_reserved_reads_which_admission_checks_it_waits_for() -> None:
    checks = [
        {"name": "nodes", "state": "Pending", "message": "not enough resources yet"},
        {"name": "budget", "state": "Ready", "message": "paid"},
        {"name": "license", "state": "Retry"},
    ]
    again = (("QuotaReserved", "True"), ("Admitted", "False"), ("Evicted", "False"))
    for conditions in (again[:1], again):
        words = workloads.answer(workload(*conditions, admissionChecks=checks)).message
        assert words == "admission check nodes: not enough resources yet; admission check license: Retry"


def test_a_workload_that_somebody_deleted_is_withdrawn_although_it_is_admitted() -> None:
    found = workload(("Admitted", "True"))
    found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert workloads.answer(found).withdrawn


def test_a_request_becomes_a_workload_that_its_job_owns_and_that_stays_until_the_pods_are_gone() -> None:
    job = make_job().label(PRIORITY_CLASS_LABEL, "none").label(QUEUE_LABEL, "of-the-next-start").job()
    body = workloads.render(job, REQUEST.less(1), claimed=False, class_value=0)
    metadata, spec = body["metadata"], body["spec"]
    assert metadata["labels"] == {JOB_LABEL: "digits", JOB_UID_LABEL: job.metadata.uid}
    assert metadata["ownerReferences"] == [owner_reference(job)]
    assert metadata["finalizers"] == [workloads.FINALIZER]
    assert (spec["queueName"], spec["priority"], spec["priorityClassRef"]["name"]) == ("team-a", 0, "none")
    (pods,) = spec["podSets"]
    assert (pods["name"], pods["count"], pods["template"]["spec"]["restartPolicy"]) == ("workers", 4, "Never")


def test_of_two_claims_the_newer_goes_first_and_both_before_any_job() -> None:
    job = make_job().label(PRIORITY_CLASS_LABEL, "low").job()
    base = workloads.render(job, REQUEST, claimed=False, class_value=-100)["spec"]
    older, newer = (
        workloads.render(job, REQUEST.model_copy(update={"name": name}), claimed=True, class_value=-100)["spec"]
        for name in ("digits-q1", "digits-q2")
    )
    assert (base["priority"], older["priority"], newer["priority"]) == (-100, -1_000_000_101, -1_000_000_102)
    assert base["priorityClassRef"]["name"] == "low"
    assert "priorityClassRef" not in newer, "Kueue would not let it have another priority than its class"


def test_one_write_ends_an_eviction_and_returns_the_quota() -> None:
    found = workload(
        ("QuotaReserved", "True"), ("Admitted", "True"), ("Evicted", "True"), ("PodsReady", "True"), admission={"x": 1}
    )
    assert workloads.is_evicted(found)
    patch = workloads.requeued(found, REQUEST.model_copy(update={"returned": 2, "admitted": False}), NOW)
    assert patch["metadata"] == {"resourceVersion": "7"}
    assert patch["status"]["admission"] is None
    assert patch["status"]["reclaimablePods"] == [{"name": "workers", "count": 2}]
    conditions = {one["type"]: one["status"] for one in patch["status"]["conditions"]}
    assert conditions == {"Evicted": "True", "QuotaReserved": "False", "Admitted": "False", "Requeued": "True"}


READY = ("PodsReady", "True")


@pytest.mark.parametrize(
    ("changes", "members", "confirmed", "before", "told"),
    [
        ({}, (0, 1), True, [], ["PodsReady"]),
        ({}, (0, 1, 2), True, [], ["PodsReady"]),
        ({}, (0, 1), False, [], None),
        ({}, (0, 2), True, [], None),
        ({"worker_ids": []}, (0, 1), True, [], None),
        ({"admitted": False}, (0, 1), True, [], None),
        ({"returned": 2}, (), False, [READY], ["PodsReady"]),
        ({"returned": 2, "admitted": False}, (0, 1), True, [READY], []),
    ],
    ids=["all", "with a claim", "not yet", "not all", "none", "waits", "once ready", "waits again"],
)
def test_pods_are_ready_once_all_of_the_request_train_and_until_it_waits_again(
    changes: dict[str, Any],
    members: tuple[int, ...],
    confirmed: bool,
    before: list[tuple[str, str]],
    told: list[str] | None,
) -> None:
    generation = None
    if members:
        pods = [Member(name=f"digits-w{key}", uid=f"uid-{key}", address="a:1") for key in members]
        generation = Generation(
            job_uid="job", layout_generation=2, stages=1, pipelines=len(pods), members=pods, leader="digits-w0",
            nonce="n", reason=ResizeReason.START, confirmed_generation=2 if confirmed else 1,
        )  # fmt: skip
    body = workloads.usage(workload(*before), REQUEST.model_copy(update=changes), generation, NOW)
    conditions = None if body is None else [one["type"] for one in body["status"].get("conditions", [])]
    assert conditions == told


def test_kueue_is_told_once_what_is_returned_and_that_all_pods_run() -> None:
    members = [Member(name=f"digits-w{key}", uid=f"uid-{key}", address="a:1") for key in (0, 1)]
    generation = Generation(
        job_uid="job",
        layout_generation=1, stages=2, pipelines=1, members=members, leader="digits-w0", nonce="n",
        reason=ResizeReason.START, confirmed_generation=1,
    )  # fmt: skip
    found = workload(("Admitted", "True"))
    assert workloads.usage(found, REQUEST, None, NOW) is None
    body = workloads.usage(found, REQUEST.model_copy(update={"returned": 2}), generation, NOW)
    assert body is not None
    assert body["status"]["reclaimablePods"] == [{"name": "workers", "count": 2}]
    assert [(one["type"], one["status"]) for one in body["status"]["conditions"]] == [("PodsReady", "True")]
    told = copy.deepcopy(found)
    told["status"] |= {"reclaimablePods": body["status"]["reclaimablePods"]}
    told["status"]["conditions"] += body["status"]["conditions"]
    assert workloads.usage(told, REQUEST.model_copy(update={"returned": 2}), generation, NOW) is None


def test_pods_carry_what_flavors_and_admission_checks_say() -> None:
    flavor = {"spec": {"nodeLabels": {"pool": "gold"}, "tolerations": [{"key": "gold", "operator": "Exists"}]}}
    update: Object = {"name": "workers", "nodeSelector": {"rack": "7"}, "annotations": {"booked": "yes"}}
    update |= {"labels": {"block": "b"}, "tolerations": [{"key": "booked", "operator": "Exists"}]}
    found = workload(admissionChecks=[{"name": "booking", "podSetUpdates": [update]}])
    assigned = workloads.assignment(found, [flavor, {"metadata": {"name": "of any nodes"}}])
    assert assigned.node_selector == {"pool": "gold", "rack": "7"}
    assert assigned.tolerations == [{"key": key, "operator": "Exists"} for key in ("gold", "booked")]
    assert assigned.labels == {"block": "b"}
    assert assigned.annotations == {"booked": "yes"}
