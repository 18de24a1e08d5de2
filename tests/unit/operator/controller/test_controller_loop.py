"""What a turn of a job's loop writes, and which writes may wait."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from pipetransformer_contract.api import JobSpec, JobStatus, PipeTrainingJob
from pipetransformer_contract.api.labels import CHECKPOINT_NOW_ANNOTATION
from pipetransformer_contract.api.status import Condition, ConditionStatus, ConditionType, Reason, Share
from pipetransformer_contract.messages import Heartbeat, Ready, Report
from pipetransformer_operator.channel.authenticator import Identity
from pipetransformer_operator.channel.board import Ended, NotYetDurable
from pipetransformer_operator.channel.limits import pulse
from pipetransformer_operator.channel.limits.pulse import Pulse
from pipetransformer_operator.controller.loop import JobLoop, Pace
from pipetransformer_operator.controller.manager import Controller
from pipetransformer_operator.controller.ports import (
    Conflict,
    Invalid,
    LoopMetrics,
    NameConflict,
    Refused,
    TurnResult,
    Unavailable,
)
from pipetransformer_operator.controller.releases import Releases
from pipetransformer_operator.controller.slots import Slots
from pipetransformer_operator.plan import (
    DisruptionBudget,
    Observed,
    Plan,
    PlanEvent,
    Worker,
    WorkerPhase,
    plan,
    worker_name,
)
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.controller import KEY, NOW, Turns, make_loop
from tests.testkit.operator.shared_cluster import Cluster


class Written(Cluster):
    """Counts writes."""

    statuses = 0

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        self.statuses += 1
        await super().write_status(job, status)


@pytest.mark.parametrize(("jobs", "written"), [(1000, False), (0, True)])
async def test_words_that_change_with_every_pod_are_written_now_and_then(
    jobs: int, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "SHORTEST_WORDS_SECONDS", 0.0)
    others = Pulse()
    others.add(workers=0, jobs=jobs - 1)  # and this one
    cluster = Written(0, make_job().workers(4).job())
    loop = make_loop(cluster, pulse=others)
    for _ in range(3):
        await loop.turn(cluster.jobs[KEY])
    settled = cluster.statuses
    pods = cluster.workers["digits"]
    pods[0] = replace(pods[0], why_pending="Unschedulable: no node is left")

    again = await loop.turn(cluster.jobs[KEY])

    assert cluster.statuses == settled + written
    assert again is not None and (written or 0 < again <= 100), "it is written once the time is over"


async def test_words_wait_their_turn_if_other_jobs_wrote_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "SHORTEST_WORDS_SECONDS", 1e-9)
    monkeypatch.setattr(pulse, "WORDS_PER_SECOND", 1e9)
    others = Pulse()
    cluster = Written(0, make_job().workers(4).job())
    loop = make_loop(cluster, pulse=others)
    for _ in range(3):
        await loop.turn(cluster.jobs[KEY])
    settled = cluster.statuses
    while others.take_words():
        pass
    pods = cluster.workers["digits"]
    pods[0] = replace(pods[0], why_pending="Unschedulable: no node is left")
    again = await loop.turn(cluster.jobs[KEY])
    assert (cluster.statuses, again) == (settled, others.words_seconds)


async def test_a_start_among_many_writes_its_status_once_before_its_workers_are_ready() -> None:
    others = Pulse()
    others.add(workers=0, jobs=999)
    cluster = Written(4, make_job().workers(4).job())
    loop = make_loop(cluster, pulse=others)
    for _ in range(4):
        await loop.turn(cluster.jobs[KEY])
    assert all(worker.scheduled for worker in cluster.workers["digits"])
    assert cluster.statuses == 1
    first = cluster.status("digits")
    assert first.resize is not None and first.resize.trouble_time == NOW
    eased = first.model_copy(update={"resize": first.resize.model_copy(update={"trouble_time": None})})
    assert eased.says_the_same_as(first)
    assert not first.says_the_same_as(eased), "trouble that begins is written at once, because its time counts"


async def test_what_is_more_than_words_is_written_at_once() -> None:
    cluster = Written(0, make_job().workers(4).job())
    loop = make_loop(cluster)
    for _ in range(3):
        await loop.turn(cluster.jobs[KEY])
    settled = cluster.statuses
    pods = cluster.workers["digits"]
    pods[0] = replace(pods[0], terminating=True)

    await loop.turn(cluster.jobs[KEY])

    assert cluster.statuses == settled + 1
    assert cluster.status("digits").worker_ids == [1, 2, 3, 4]


@pytest.mark.parametrize(("ending", "ended"), [("suspend", False), ("fail", True)])
async def test_members_learn_of_their_jobs_failure_but_not_of_its_suspension(ending: str, ended: bool) -> None:
    cluster = Cluster(0, make_job().workers(4).job())
    loop = make_loop(cluster)
    for _ in range(3):
        await loop.turn(cluster.jobs[KEY])
    job, member = cluster.jobs[KEY], Identity("default", "digits-w0", "digits-w0")
    if ending == "suspend":
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"suspend": True})})
    else:
        failed = Condition(
            type=ConditionType.FAILED, status=ConditionStatus.TRUE, reason="Broken", last_transition_time=NOW
        )
        ended_now = {"conditions": [failed], "completion_time": NOW}
        job = job.model_copy(update={"status": job.status.model_copy(update=ended_now)})
    cluster.jobs[KEY] = job

    await loop.turn(job)

    with pytest.raises(Ended) if ended else nullcontext():
        loop.board.put_heartbeat(member, Heartbeat(layout_generation=1))


class Contested(Written):
    """Another client writes the job just before its first status is written."""

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        if self.statuses == 0:
            self.statuses += 1
            raise Conflict("the object has been modified")
        await super().write_status(job, status)


async def test_a_plan_from_an_old_look_is_not_applied_and_the_loop_looks_again() -> None:
    cluster = Contested(4, make_job().workers(4).job())
    turns: list[TurnResult] = []

    class Told(LoopMetrics):
        def on_turned(self, result: TurnResult, seconds: float) -> None:
            turns.append(result)
            assert result is not TurnResult.CONFLICT or not cluster.workers["digits"], "pods without a durable status"

    loop = make_loop(cluster, Pace(debounce=0.001), Told())
    running = asyncio.create_task(loop.run())
    while len(cluster.workers["digits"]) < 4:
        await cluster.next_change()
    running.cancel()
    assert turns[0] is TurnResult.CONFLICT


async def test_a_new_job_sees_nothing_of_a_deleted_jobs_workers_of_its_name() -> None:
    first = make_job().workers(2).job()
    second = first.model_copy(update={"metadata": first.metadata.model_copy(update={"uid": "second"})})
    cluster = Cluster(4, first)
    controller = Controller(cluster, cluster, pace=Pace(debounce=0.001))
    controller.wake(KEY)
    while len(cluster.workers["digits"]) < 2:
        await cluster.next_change()
    old = controller.boards[KEY]
    old.put_ready(Identity("default", "digits-w0", "uid-digits-w0"), Ready(address="10.0.0.1:1"))

    cluster.jobs[KEY], cluster.workers["digits"] = second, []
    controller.wake(KEY)
    while len(cluster.workers["digits"]) < 2:
        await cluster.next_change()

    assert controller.boards[KEY] is not old and not controller.boards[KEY].ready
    await controller.stop()


class Particular(Cluster):
    """Takes no status with a report of that step: by default for good, as by bounds that are not known here."""

    error: Exception | None = Invalid("422 status.lastReport: Duplicate value")

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        if self.error is not None and status.last_report is not None and status.last_report.step == 7:
            raise self.error
        await super().write_status(job, status)


class Leader:
    """A job of two workers whose first generation is published, and what one of them reports."""

    def __init__(self) -> None:
        job = make_job().stages(1).workers(2).job()
        job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": "job"})})
        self.cluster = Particular(4, job)
        self.loop = make_loop(self.cluster)

    async def turn(self) -> None:
        await self.loop.turn(self.cluster.jobs[KEY])

    async def start(self) -> None:
        await self.turn()
        await self.turn()
        for number in range(2):
            self.loop.board.put_ready(self._worker(number), Ready(address="10.0.0.1:1"))
        await self.turn()

    async def report(self, step: int, timeout: float = 10.0) -> asyncio.Task[None]:
        said = Report(job_uid="job", layout_generation=1, step=step, boundary=0, num_layers=2, bytes_budget=1)
        sending = asyncio.create_task(self.loop.board.put_report(self._worker(0), said, timeout=timeout))
        await asyncio.sleep(0)
        return sending

    def last_step(self) -> int | None:
        last = self.cluster.status("digits").last_report
        return last.step if last else None

    def _worker(self, number: int) -> Identity:
        return Identity("default", f"digits-w{number}", f"uid-digits-w{number}")


async def test_members_of_a_job_past_its_deadline_are_told_to_stop_and_not_that_it_ended() -> None:
    leader = Leader()
    await leader.start()
    job = leader.cluster.jobs[KEY]
    policy = job.spec.run_policy.model_copy(update={"active_deadline_seconds": 60})
    spec = job.spec.model_copy(update={"run_policy": policy})
    status = job.status.model_copy(update={"start_time": NOW - timedelta(hours=1)})
    leader.cluster.jobs[KEY] = job.model_copy(update={"spec": spec, "status": status})

    await leader.turn()

    assert leader.cluster.status("digits").is_true(ConditionType.FAILED)
    leader.loop.board.put_heartbeat(Identity("default", "digits-w0", "uid-digits-w0"), Heartbeat(layout_generation=1))
    assert leader.loop.board.stop


async def test_a_report_that_no_status_can_hold_is_left_out_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    leader = Leader()
    await leader.start()
    refused = await leader.report(7, timeout=0.05)
    leader.cluster.workers["digits"].pop()

    await leader.turn()

    assert leader.cluster.status("digits").worker_ids != [0, 1], "the lost one is replaced"
    assert "without the leader's report of step 7 in generation 1: 422" in caplog.text
    with pytest.raises(NotYetDurable):
        await refused
    taken = await leader.report(8)
    await leader.turn()
    await taken
    assert leader.last_step() == 8


@pytest.mark.parametrize("error", [Refused("500 etcdserver: leader changed"), Unavailable("503")])
async def test_a_report_that_cannot_be_written_now_is_in_the_next_attempt(error: Exception) -> None:
    leader = Leader()
    await leader.start()
    leader.cluster.error = error
    sent = await leader.report(7)
    with pytest.raises(type(error)):
        await leader.turn()
    assert leader.last_step() is None
    leader.cluster.error = None
    await leader.turn()
    await sent
    assert leader.last_step() == 7


class Failing(Cluster):
    """Takes no new pod."""

    error: Exception

    def __init__(self, nodes: int, *jobs: PipeTrainingJob) -> None:
        super().__init__(nodes, *jobs)
        self.told: list[str] = []
        self.deleted: list[str] = []

    async def create(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> None:
        raise self.error

    async def tell(self, job: PipeTrainingJob, event: PlanEvent) -> None:
        self.told.append(event.message)

    async def delete(self, job: PipeTrainingJob, name: str = "", uid: str = "") -> None:
        self.deleted.append(name)
        await super().delete(job, name, uid)


@pytest.fixture
def failing() -> Failing:
    """Two workers are wanted, and one that is there is not."""
    cluster = Failing(4, make_job().workers(2).job())
    cluster.workers["digits"] = [Worker(7, "digits-w7", "uid-7")]
    return cluster


@pytest.mark.parametrize("error", [Unavailable("503"), Conflict("409")])
async def test_a_failed_write_is_retried_and_stops_neither_deletions_nor_events(
    error: Exception, failing: Failing
) -> None:
    failing.error = error

    with pytest.raises(type(error)):
        await make_loop(failing, writes=2).turn(failing.jobs[KEY])

    assert failing.deleted == ["digits-w7"]
    assert failing.told == ["Creating 2 workers, so the job has 2", "Deleting digits-w7: no longer needed by the job"]


async def test_a_refusal_shows_in_status_and_stops_neither_deletions_nor_events(failing: Failing) -> None:
    failing.error = Refused("500 failed calling webhook")
    loop = make_loop(failing, writes=2)

    await loop.turn(failing.jobs[KEY])

    assert failing.deleted == ["digits-w7"]
    assert failing.told == ["Creating 2 workers, so the job has 2", "Deleting digits-w7: no longer needed by the job"]
    with pytest.raises(Refused):  # the words are in the status by then
        await loop.turn(failing.jobs[KEY])
    running = failing.status("digits").condition(ConditionType.RUNNING)
    assert running is not None and (running.reason, running.message) == ("CreationRefused", str(failing.error))


class Counted(Failing):
    """Counts the creations that it refuses."""

    error = Refused("500 failed calling webhook")
    asked = 0

    async def create(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> None:
        self.asked += 1
        await super().create(job, worker_id, status)


@pytest.mark.parametrize(("seconds", "asked"), [(60.0, 6), (0.0, 1)])
async def test_a_turn_tries_other_workers_only_for_a_while_after_a_refusal(
    seconds: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An admission that takes long would make a turn of many workers last for minutes."""
    monkeypatch.setattr("pipetransformer_operator.controller.apply.REFUSED_SECONDS", seconds)
    cluster = Counted(6, make_job().workers(6).job())

    await make_loop(cluster, writes=2).turn(cluster.jobs[KEY])

    assert cluster.asked == asked


class Together(Failing):
    """Takes events only two at a time."""

    error = Unavailable("503")
    pair = asyncio.Barrier(2)

    async def tell(self, job: PipeTrainingJob, event: PlanEvent) -> None:
        await self.pair.wait()
        await super().tell(job, event)


async def test_the_events_of_a_turn_are_written_at_once() -> None:
    """Otherwise events that take long, as with an etcd of their own, would hold up the job one after the other."""
    cluster = Together(4, make_job().workers(2).job())
    cluster.workers["digits"] = [Worker(7, "digits-w7", "uid-7")]

    with pytest.raises(Unavailable):
        await make_loop(cluster, writes=2).turn(cluster.jobs[KEY])

    assert len(cluster.told) == 2


class Unprotected(Cluster):
    """Takes no budget."""

    error = Refused("exceeded quota: team")

    async def protect(self, job: PipeTrainingJob, budget: DisruptionBudget | None) -> None:
        raise self.error


async def test_a_refusal_of_what_protects_workers_is_told_apart_from_one_of_workers() -> None:
    cluster = Unprotected(4, make_job().workers(2).job())
    loop = make_loop(cluster, writes=2)
    await loop.turn(cluster.jobs[KEY])
    observed = loop.observe(cluster.jobs[KEY])
    assert (observed.unprotected, observed.refusal) == (str(cluster.error), "")
    assert len(cluster.workers["digits"]) == 2
    with pytest.raises(Refused):  # the words are in the status by then
        await loop.turn(cluster.jobs[KEY])


async def test_a_refusal_that_lasts_puts_off_no_turn_that_the_plan_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def soon(spec: JobSpec, observed: Observed, now: datetime) -> Plan:
        return replace(plan(spec, observed, now), requeue_after=0.01)

    monkeypatch.setattr("pipetransformer_operator.controller.loop.plan", soon)
    cluster, turns = Unprotected(4, make_job().workers(2).job()), Turns()
    loop = make_loop(cluster, Pace(debounce=0.001, first_retry=600.0, longest_retry=600.0), turns, writes=2)
    running = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(10):
            await turns.taken(10)
    finally:
        running.cancel()


class Unfit(Failing):
    """Its namespace does not take what workers need, and it takes long to say so."""

    def __init__(self, nodes: int, *jobs: PipeTrainingJob) -> None:
        super().__init__(nodes, *jobs)
        self.preparations = 0
        self.asked = asyncio.Event()
        self.answered = asyncio.Event()

    async def prepare(self, job: PipeTrainingJob, status: JobStatus, new: Sequence[int]) -> None:
        self.preparations += 1
        self.asked.set()
        await self.answered.wait()
        raise self.error

    async def create(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> None:
        raise AssertionError("its pods would never start")


@pytest.mark.parametrize("error", [Refused("500 failed calling webhook"), Unavailable("503")])
async def test_a_namespace_that_refuses_workers_needs_is_asked_once_a_turn(
    error: Exception,
) -> None:
    cluster = Unfit(4, make_job().workers(3).job())
    cluster.workers["digits"] = [Worker(7, "digits-w7", "uid-7")]
    cluster.error = error
    writes = Slots(1)
    loop = JobLoop(KEY, cluster, cluster, lambda: NOW, Pace(), LoopMetrics(), Pulse(), writes, Releases())

    turn = asyncio.create_task(loop.turn(cluster.jobs[KEY]))
    await cluster.asked.wait()
    async with writes.of("default"):
        """Other jobs create and delete meanwhile."""
    cluster.answered.set()
    outcome = (await asyncio.gather(turn, return_exceptions=True))[0]

    assert cluster.preparations == 1
    assert cluster.deleted == ["digits-w7"]
    if isinstance(error, Refused):
        with pytest.raises(Refused):
            await loop.turn(cluster.jobs[KEY])
        running = cluster.status("digits").condition(ConditionType.RUNNING)
        assert running is not None and (running.reason, running.message) == ("CreationRefused", str(error))
    else:
        assert outcome is error


class Protected(Failing):
    """Notes what it is asked for, and refuses what workers need."""

    def __init__(self, nodes: int, *jobs: PipeTrainingJob) -> None:
        super().__init__(nodes, *jobs)
        self.asked: list[str] = []

    async def prepare(self, job: PipeTrainingJob, status: JobStatus, new: Sequence[int]) -> None:
        self.asked.append("prepare")
        raise Refused("a quota says no")

    async def protect(self, job: PipeTrainingJob, budget: DisruptionBudget | None) -> None:
        self.asked.append("protect")


async def test_running_workers_get_what_new_ones_need_and_their_protection() -> None:
    cluster = Protected(4, make_job().workers(1).job())
    status = JobStatus(worker_ids=[0], next_worker_id=1, initial_workers=1, num_shards=1)
    cluster.jobs[KEY] = cluster.jobs[KEY].model_copy(update={"status": status})
    cluster.workers["digits"] = [Worker(0, "digits-w0", "uid-0", WorkerPhase.RUNNING, scheduled=True)]
    loop = make_loop(cluster)

    await loop.turn(cluster.jobs[KEY])

    assert sorted(cluster.asked) == ["prepare", "protect"]
    assert cluster.status("digits").worker_ids == [0]


async def test_a_job_that_ends_no_longer_keeps_evictions_off() -> None:
    cluster = Protected(4, make_job().workers(1).set("runPolicy.activeDeadlineSeconds", 60).job())
    status = JobStatus(worker_ids=[0], next_worker_id=1, initial_workers=1, num_shards=1)
    status = status.model_copy(update={"start_time": NOW - timedelta(hours=1)})
    cluster.jobs[KEY] = cluster.jobs[KEY].model_copy(update={"status": status})
    cluster.workers["digits"] = [Worker(0, "digits-w0", "uid-0", WorkerPhase.RUNNING, scheduled=True)]
    await make_loop(cluster).turn(cluster.jobs[KEY])
    assert cluster.status("digits").is_true(ConditionType.FAILED)
    assert "protect" in cluster.asked


class Away(Cluster):
    """The API server may be away."""

    away = False

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        if self.away:
            raise Unavailable("503")
        await super().write_status(job, status)


async def test_an_api_server_that_is_away_is_not_asked_at_the_pace_of_an_older_plan() -> None:
    cluster = Away(0, make_job().workers(2).job())
    loop = make_loop(cluster, writes=2)
    for _ in range(3):
        await loop.turn(cluster.jobs[KEY])
    assert loop._due is not None, "the start has a deadline"
    cluster.away, pods = True, cluster.workers["digits"]
    pods[0] = replace(pods[0], terminating=True)
    with pytest.raises(Unavailable):
        await loop.turn(cluster.jobs[KEY])
    assert loop._due is None


async def test_a_share_lasts_until_jobs_share_again() -> None:
    cluster, share = Cluster(4, make_job().workers(2).job()), Share(workers=2, layout_generation=1)
    loop, job = make_loop(cluster), cluster.jobs[KEY]
    job = job.model_copy(update={"status": JobStatus(share=share)})
    assert loop.observe(job).share == share, "an operator that has just started knows no other"
    loop.set_share(None)
    assert loop.observe(job).share is None


class Lagging(Written):
    """Another client wrote the job, and the watch does not show it."""

    async def write_status(self, job: PipeTrainingJob, status: JobStatus) -> None:
        self.statuses += 1
        raise Conflict("the object has been modified")


async def test_a_change_that_is_not_seen_for_long_is_asked_for_ever_more_rarely() -> None:
    cluster = Lagging(4, make_job().workers(4).job())
    turns = Turns()
    loop = make_loop(cluster, Pace(debounce=0.01, longest_conflict=0.16), turns)
    running = asyncio.create_task(loop.run())
    started = asyncio.get_running_loop().time()
    await turns.taken(7)
    assert asyncio.get_running_loop().time() - started >= 0.01 + 0.02 + 0.04 + 0.08 + 0.16 + 0.16
    loop.notice()  # the watch has caught up
    await turns.taken()
    assert cluster.statuses == 8
    running.cancel()


class Slow(Cluster):
    """It does not answer to a creation."""

    def __init__(self, nodes: int, *jobs: PipeTrainingJob) -> None:
        super().__init__(nodes, *jobs)
        self.asked = asyncio.Event()

    async def create(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> None:
        self.asked.set()
        await asyncio.Event().wait()


async def test_a_namespace_whose_creations_take_long_keeps_no_other_from_writing() -> None:
    cluster, writes = Slow(8, make_job().workers(8).job()), Slots(4)
    loop = JobLoop(KEY, cluster, cluster, lambda: NOW, Pace(), LoopMetrics(), Pulse(), writes, Releases())
    turn = asyncio.create_task(loop.turn(cluster.jobs[KEY]))
    await cluster.asked.wait()
    async with writes.of("another"):
        turn.cancel()


class Taken(Cluster):
    """All names of workers are taken by pods of others."""

    attempts = warnings = 0
    taken = True

    async def create(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> None:
        self.attempts += 1
        if not self.taken:
            return await super().create(job, worker_id, status)
        raise NameConflict(worker_name(job.metadata.name, worker_id))

    async def tell(self, job: PipeTrainingJob, event: PlanEvent) -> None:
        self.warnings += event.reason is Reason.NAME_CONFLICT


async def test_a_name_that_stays_taken_is_tried_at_the_pace_of_resyncs() -> None:
    cluster = Taken(4, make_job().workers(2).job())
    turns, pace = Turns(), Pace(debounce=0.001, resync=0.2)
    loop = make_loop(cluster, pace, turns, writes=2)
    running = asyncio.create_task(loop.run())
    await turns.taken(2)  # tried, and said
    assert cluster.attempts == 4
    said = turns.newest
    await turns.taken()
    running.cancel()
    assert turns.newest - said >= pace.resync
    conditions = {condition.reason for condition in cluster.status("digits").conditions}
    assert Reason.NAME_CONFLICT in conditions and cluster.attempts == 6
    assert cluster.warnings == 1


async def test_a_taken_name_that_is_free_again_is_no_conflict_any_more() -> None:
    cluster = Taken(4, make_job().workers(2).job())
    loop = make_loop(cluster, writes=2)
    await loop.turn(cluster.jobs[KEY])
    assert loop.observe(cluster.jobs[KEY]).conflicts == ("digits-w0", "digits-w1")
    cluster.taken = False
    await loop.turn(cluster.jobs[KEY])
    assert loop.observe(cluster.jobs[KEY]).conflicts == ()


class TakenAtFirst(Cluster):
    """The first worker's name is taken by a pod of others."""

    async def create(self, job: PipeTrainingJob, worker_id: int, status: JobStatus) -> None:
        if worker_id == 0:
            raise NameConflict(worker_name(job.metadata.name, worker_id))
        await super().create(job, worker_id, status)


async def test_a_taken_name_is_forgotten_once_the_job_goes_on_under_other_names() -> None:
    cluster = TakenAtFirst(9, make_job().workers(2).job())
    loop = JobLoop(KEY, cluster, cluster, lambda: cluster.now, Pace(), LoopMetrics(), Pulse(), Slots(2), Releases())

    async def admitted() -> str:
        for _ in range(4):
            await loop.turn(cluster.jobs[KEY])
        condition = cluster.status("digits").condition(ConditionType.ADMITTED)
        assert condition is not None
        return condition.reason

    assert await admitted() == Reason.NAME_CONFLICT
    cluster.now += timedelta(seconds=601)
    await admitted()
    cluster.now += timedelta(seconds=61)
    assert await admitted() == Reason.NO_QUEUE
    assert cluster.status("digits").worker_ids == [2, 3]


async def test_changes_wait_for_those_that_follow_but_a_question_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulse, "NOTICES_PER_SECOND", 1 / 60)  # this one job's changes wait for a minute
    cluster = Cluster(4, make_job().workers(4).job())
    turns = Turns()
    loop = make_loop(cluster, Pace(debounce=0.0), turns)
    running = asyncio.create_task(loop.run())
    loop.wake()
    await turns.taken()
    loop.notice()
    for _ in range(20):
        await asyncio.sleep(0)
    assert turns.none(), "it waits for more changes"
    loop.wake()
    await turns.taken()
    monkeypatch.setattr(pulse, "NOTICES_PER_SECOND", 1000)
    loop.notice()
    await turns.taken()
    running.cancel()


def being_deleted(job: PipeTrainingJob, *finalizers: str) -> PipeTrainingJob:
    """The job as shown after its deletion, while a finalizer keeps it."""
    changes = {"deletion_timestamp": "2026-01-01T00:00:00Z", "finalizers": list(finalizers)}
    return job.model_copy(update={"metadata": job.metadata.model_copy(update=changes)})


async def test_a_deleted_job_that_a_finalizer_keeps_ends_its_workers() -> None:
    leader = Leader()
    await leader.start()
    leader.cluster.jobs[KEY] = being_deleted(leader.cluster.jobs[KEY], "example.com/parent")
    sent = await leader.report(8)

    await leader.turn()
    assert leader.loop.board.stop
    await leader.turn()

    await sent
    assert leader.cluster.workers["digits"] == []
    suspended = leader.cluster.status("digits").condition(ConditionType.SUSPENDED)
    assert suspended is not None and suspended.reason == "BeingDeleted"


async def test_nothing_of_a_deleted_job_that_the_cluster_deletes_is_made_again() -> None:
    cluster = Protected(4, make_job().workers(2).job())
    cluster.jobs[KEY] = being_deleted(cluster.jobs[KEY], "foregroundDeletion")
    await make_loop(cluster).turn(cluster.jobs[KEY])
    assert cluster.asked == []


async def test_workers_of_a_job_that_is_deleted_without_them_are_left_alone() -> None:
    cluster = Failing(4, make_job().workers(2).job())
    cluster.workers["digits"] = [Worker(7, "digits-w7", "uid-7", WorkerPhase.RUNNING, scheduled=True)]
    cluster.jobs[KEY] = being_deleted(cluster.jobs[KEY], "orphan", "example.com/parent")

    assert await make_loop(cluster).turn(cluster.jobs[KEY]) is None
    assert (cluster.deleted, cluster.told) == ([], [])


async def test_the_annotation_of_a_job_asks_its_members_for_a_checkpoint() -> None:
    leader = Leader()
    await leader.start()
    job = leader.cluster.jobs[KEY]
    metadata = job.metadata.model_copy(update={"annotations": {CHECKPOINT_NOW_ANNOTATION: "one"}})
    with_checkpoint = make_job().stages(1).workers(2).checkpoint().job().spec
    leader.cluster.jobs[KEY] = job.model_copy(update={"metadata": metadata, "spec": with_checkpoint})
    await leader.turn()
    assert leader.cluster.status("digits").awaited_checkpoint == "one"
    assert leader.loop.board.checkpoint_request == "one"


class Deleting(Cluster):
    """Notes whether the job itself was deleted."""

    ended: tuple[str, ...] = ()

    async def delete(self, job: PipeTrainingJob, name: str = "", uid: str = "") -> None:
        if not name:
            self.ended += (job.metadata.name,)
        await super().delete(job, name, uid)


@pytest.mark.parametrize(("seconds", "deleted"), [(0, ("digits",)), (60, ())])
async def test_a_job_that_ended_is_deleted_once_its_time_to_live_is_over(
    seconds: int, deleted: tuple[str, ...]
) -> None:
    cluster = Deleting(0, make_job().set("runPolicy.ttlSecondsAfterFinished", seconds).job())
    complete = Condition(
        type=ConditionType.COMPLETE, status=ConditionStatus.TRUE, reason="Done", last_transition_time=NOW
    )
    status = JobStatus(conditions=[complete], start_time=NOW, completion_time=NOW)
    cluster.jobs[KEY] = cluster.jobs[KEY].model_copy(update={"status": status})
    await make_loop(cluster).turn(cluster.jobs[KEY])
    assert cluster.ended == deleted
