"""A turn of a job in a queue: the status is written before the queue is asked, and a silent queue holds nothing up."""

import pytest

from pipetransformer_contract.api import JobStatus, PipeTrainingJob
from pipetransformer_contract.api.labels import QUEUE_LABEL
from pipetransformer_contract.api.status import QuotaRequest
from pipetransformer_operator.channel.limits.pulse import Pulse
from pipetransformer_operator.controller.loop import JobLoop
from pipetransformer_operator.controller.ports import JobKey, LoopMetrics, Unavailable
from pipetransformer_operator.controller.releases import Releases
from pipetransformer_operator.controller.slots import Slots
from pipetransformer_operator.plan import Answer, Queue
from tests.testkit.operator.builders import make_job
from tests.testkit.operator.fake_queue import QUEUE
from tests.testkit.operator.shared_cluster import PACE, Cluster

pytestmark = pytest.mark.timeout(60)
KEY = JobKey("default", "digits")


class SilentQueue:
    """Admitted the first request once, and takes no call now."""

    def __init__(self) -> None:
        self.asked: list[JobStatus] = []

    def observe(self, job: PipeTrainingJob) -> Queue | None:
        return Queue(answers={"digits-q0": Answer(True)})

    async def apply(self, job: PipeTrainingJob, status: JobStatus) -> None:
        self.asked.append(status)
        raise Unavailable("no answer")


async def test_what_a_queue_cannot_be_told_now_holds_nothing_else_up() -> None:
    request = QuotaRequest(name="digits-q0", queue=QUEUE, workers=2, admitted=True)
    job = make_job().stages(2).workers(2).checkpoint().label(QUEUE_LABEL, QUEUE).job()
    job = job.model_copy(update={"status": JobStatus(quota_requests=[request], next_request_id=1)})
    cluster, queue = Cluster(8, job), SilentQueue()
    loop = JobLoop(
        KEY, cluster, cluster, lambda: cluster.now, PACE, LoopMetrics(), Pulse(), Slots(1), Releases(), queue
    )
    with pytest.raises(Unavailable, match="no answer"):
        await loop.turn(job)
    assert [worker.id for worker in cluster.workers["digits"]] == [0, 1]
    assert queue.asked == [cluster.jobs[KEY].status]
    assert queue.asked[0].quota_requests[0].worker_ids == [0, 1]
