"""One life: a cluster, operators, jobs and faults, all from one seed, judged by the oracle until everything is done."""

import asyncio
import gc
from dataclasses import dataclass, field
from random import Random
from typing import Any

from .api_server import ApiServer, Object
from .cluster import Cluster, Idle
from .faults import strike
from .loop import Process, SeededLoop
from .network import Network
from .operating import NAMESPACE, Operator, Service, virtual_now
from .oracle import Oracle
from .scenario import JobPlan, Scenario
from .trace import Trace
from .trainer import Worker
from .truth import Job

JOBS = ("apis/training.pipetransformer.io/v1alpha1", "pipetrainingjobs")
#: A job that fits is trained within this time after the last fault.
PATIENCE_SECONDS = 1800.0
#: A worker that does not hear of its job's end is deleted after this time.
LAST_WORKER_SECONDS = 30.0
#: What follows from the end of the last job takes this long, and what failed is tried again within this time.
LAST_WORK_SECONDS, LAST_RETRY_SECONDS = 10.0, 40.0
#: From the end of an operator that lost its Lease to its next start.
RESTART_SECONDS = 2.0
#: Nothing may be written for this long once all is done: longer than the loops' resync.
REST_SECONDS = 35.0


@dataclass
class Result:
    """How a life ended.

    Attributes:
        digest: of its trace.
        violations: what was wrong; empty if nothing was.
        seconds: of virtual time.
        steps: callbacks that ran.
        lines: of its trace.
    """

    scenario: Scenario
    digest: str = ""
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    lines: list[str] = field(default_factory=list)


class World:
    """Everything in a life, as faults and the oracle see it.

    Attributes:
        jobs: what is true of each, by UID of its object.
    """

    def __init__(self, scenario: Scenario, loop: SeededLoop) -> None:
        seed = f"{scenario.seed}/{scenario.again}"
        self.scenario = scenario
        self.random = Random(f"{seed}/world")
        self.trace = Trace(loop.time)
        self.process = Process("cluster")
        self.server = ApiServer(lambda: self.network.latency(), lambda: virtual_now().strftime("%Y-%m-%dT%H:%M:%SZ"))
        random = Random(f"{seed}/network")
        self.network = Network(self.server, self.process, random, self.trace, scenario.late_answers)
        self.cluster = Cluster(self.server, self.process, Random(f"{seed}/cluster"), self.trace, self._program)
        self.service = Service(self.process, self.network, self.trace)
        self.jobs: dict[str, Job] = {}
        self.plans: dict[str, JobPlan] = {}
        self.oracle = Oracle(self)
        self._operators = 0

    def start_operator(self) -> Operator:
        """Another operator begins, and waits for the Lease if one leads."""
        self._operators += 1
        operator = Operator(f"operator-{self._operators}", self.network, self.random, self._restart_operator)
        self.service.operators.append(operator)
        return operator

    def _restart_operator(self) -> None:
        """The kubelet starts an operator again that ended because it lost the Lease."""
        loop = asyncio.get_running_loop()
        loop.call_later(RESTART_SECONDS, self.start_operator, context=self.process.context)

    def leader(self) -> Operator | None:
        """The operator that serves workers now."""
        return next((one for one in self.service.operators if one.serves), None)

    def submit(self, plan: JobPlan) -> None:
        """A user creates the job."""
        made = self.server.create((*JOBS, NAMESPACE, plan.name), plan.manifest())
        uid = made["metadata"]["uid"]
        self.plans[uid] = plan
        self.jobs[uid] = Job(uid, plan.name, plan.stages, plan.script, self.random, self.process)
        self.jobs[uid].on_committed.append(self.oracle.on_committed)

    def job_object(self, name: str) -> Object | None:
        """The job's newest version."""
        return self.server.get(*JOBS, NAMESPACE, name)

    def _program(self, pod: Object, process: Process) -> Any:
        owner = next((one["uid"] for one in pod["metadata"].get("ownerReferences", []) if one.get("controller")), "")
        if owner not in self.jobs:
            return Idle()
        return Worker(pod, process, self.jobs[owner], self.service, self.random)


async def _live(world: World) -> None:
    loop, scenario = asyncio.get_running_loop(), world.scenario
    for number, gpus in enumerate(scenario.nodes):
        world.cluster.add_node(f"node-{number}", gpus)
    for _ in range(scenario.operators):
        world.start_operator()
    for plan in scenario.jobs:
        loop.call_at(plan.at, world.submit, plan)
    for fault in scenario.faults:
        loop.call_at(fault.at, strike, world, fault)
    quiet = max([fault.end for fault in scenario.faults] + [plan.at for plan in scenario.jobs], default=0.0)
    while loop.time() < quiet + PATIENCE_SECONDS and not world.oracle.violations:
        await asyncio.sleep(1.0)
        leader = world.leader()
        if loop.time() > quiet and leader is not None and leader.stays and world.oracle.all_done():
            break
    else:
        if not world.oracle.violations:
            world.oracle.judge_liveness()
    if not world.oracle.violations:
        deadline = loop.time() + LAST_WORKER_SECONDS
        while loop.time() < deadline and world.cluster.running():  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(1.0)
        await asyncio.sleep(LAST_WORK_SECONDS)
        await asyncio.sleep(max(0.0, world.network.failed + LAST_RETRY_SECONDS - loop.time()))
        writes = len(world.network.writes)
        await asyncio.sleep(REST_SECONDS)
        world.oracle.judge_rest(world.network.writes[writes:])


def live(scenario: Scenario) -> Result:
    """Lives one life. The same scenario gives the same result, in every process."""
    loop = SeededLoop(Random(f"{scenario.seed}/{scenario.again}/loop"))
    collecting = gc.isenabled()
    gc.disable()
    result = Result(scenario)
    try:
        asyncio.set_event_loop(loop)
        world = World(scenario, loop)
        main = world.process.context.run(loop.create_task, _live(world))
        loop.run_until_complete(main)
        result.violations = [*world.oracle.violations, *(f"error: {error!r}" for error in loop.errors)]
        result.digest = world.trace.digest
        result.lines = world.trace.lines
    finally:
        result.seconds, result.steps = loop.time(), loop.steps
        asyncio.set_event_loop(None)
        loop.abandon()
        if collecting:
            gc.enable()
    return result
