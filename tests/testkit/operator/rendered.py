"""A worker's pod as the operator renders it."""

from typing import Any

from pipetransformer_contract.api import JobStatus
from pipetransformer_operator.kube.workers.rendering import render
from tests.testkit.operator.builders import JobBuilder

CHANNEL = "https://operator.system.svc:8443"


def pod_of(job: JobBuilder, number: int = 3) -> dict[str, Any]:
    return render(job.job(), number, JobStatus(num_shards=4), channel_url=CHANNEL)
