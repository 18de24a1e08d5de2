"""Jobs whose workers live while their pods run on fake nodes."""

import asyncio
from base64 import b64decode

from pipetransformer_contract.api import GROUP, PLURAL, VERSION
from pipetransformer_contract.api.labels import JOB_LABEL
from pipetransformer_contract.api.requests import Object
from pipetransformer_operator.kube.trust.authority import CA_FILE, SECRET
from tests.testkit.cluster.api_server import ApiServer

from .cluster import SYSTEM, OperatorProcess
from .nodes import FakeNodes
from .request import ChannelClient
from .workers import Counts, Job, Worker


class LivingJobs:
    """See the module.

    Args:
        api: of the cluster.
        channel: of the operator.
        stages: of each job.

    Attributes:
        by_uid: the jobs.
        counts: of all workers.
        nodes: the cluster's; `run` it.
        tasks: of workers whose pods run, by the pod's UID.
    """

    def __init__(self, api: ApiServer, channel: ChannelClient, stages: int) -> None:
        self.by_uid: dict[str, Job] = {}
        self.counts = Counts()
        self.nodes = FakeNodes(api, self._started, self._stopped)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._api = api
        self._channel = channel
        self._stages = stages

    @classmethod
    async def of(cls, operator: OperatorProcess, api: ApiServer, stages: int) -> "LivingJobs":
        """Jobs of this operator."""
        secret = await api.send("GET", f"/api/v1/namespaces/{SYSTEM}/secrets/{SECRET}")
        trusted = b64decode(secret["data"][CA_FILE]).decode()
        return cls(api, ChannelClient(operator.channel_port, trusted), stages)

    async def submit(self, namespace: str, manifest: Object) -> Job:
        """Creates a job."""
        folder = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
        created = await self._api.send("POST", folder, manifest)
        # Its pods may be there before the answer.
        return self._job(namespace, created["metadata"]["name"], created["metadata"]["uid"])

    def _job(self, namespace: str, name: str, uid: str) -> Job:
        return self.by_uid.setdefault(uid, Job(namespace, name, uid, self._stages))

    def _started(self, pod: Object, token: str) -> None:
        metadata = pod["metadata"]
        if JOB_LABEL not in metadata.get("labels", {}):
            return
        job = self._job(metadata["namespace"], metadata["labels"][JOB_LABEL], metadata["ownerReferences"][0]["uid"])
        address = pod["status"]["podIP"]
        worker = Worker(job, metadata["name"], metadata["uid"], address, token, self._channel, self.counts)
        self.tasks[metadata["uid"]] = asyncio.create_task(self._live(worker, metadata))

    async def _live(self, worker: Worker, metadata: Object) -> None:
        await worker.live()
        await self.nodes.exited(metadata["namespace"], metadata["name"])

    def _stopped(self, uid: str) -> None:
        if task := self.tasks.pop(uid, None):
            task.cancel()
