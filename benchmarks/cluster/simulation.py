"""One simulation: jobs, a policy, and who decides."""

from collections.abc import Callable, Sequence

from .by_parts import Elastic, Known, Rigid, Sharer, Shares
from .by_plan import Planned
from .delays import Delays
from .engine import Cluster, Run
from .policies import Decider, Policy
from .rivals import Goodput, Malleable, shortest_remaining_first
from .trace import Job

#: Of the power mean that the Pollux-like rival raises. Of -1 (Pollux's own), 0 and 1 it gives the shortest mean time to
#: the end on other seeds (7, loads 1.2 and 1.5).
POLLUX_POWER = 1.0


def simulate(
    policy: Policy,
    jobs: Sequence[Job],
    gpus: int,
    delays: Delays,
    *,
    by_plan: bool = False,
    slowness: float = 1.0,
) -> Sequence[Run]:
    """What each job did, by arrival.

    Args:
        policy: how elastic jobs run.
        jobs: by arrival.
        gpus: GPUs of the cluster.
        delays: how long what takes time takes.
        by_plan: whether the operator's `plan()` decides, and not its parts alone. Not for rivals.
        slowness: how many times as long as declared a step of an elastic job takes. Not for rivals.
    """
    if policy.decider is Decider.ORACLE:
        return shortest_remaining_first(jobs, gpus)

    def run_of(job: Job) -> Run:
        return policy.run_of(job, delays, slowness)

    if policy.decider is Decider.POLLUX:
        return pollux(policy, jobs, gpus, delays, POLLUX_POWER)

    known: Known = {}

    def by_parts(cluster: Cluster[Sharer], run: Run) -> Sharer:
        return Elastic(cluster, run, policy, known) if run.job.elastic else Rigid(cluster, run)

    def planned(cluster: Cluster[Sharer], run: Run) -> Sharer:
        return Planned(cluster, run, policy)

    driver_of: Callable[[Cluster[Sharer], Run], Sharer] = planned if by_plan else by_parts
    sharing = Shares() if policy.grows else None
    return Cluster(jobs, gpus, delays, run_of=run_of, driver_of=driver_of, sharing=sharing).simulate()


def pollux(policy: Policy, jobs: Sequence[Job], gpus: int, delays: Delays, power: float) -> Sequence[Run]:
    """What each job did under the Pollux-like rival, whose objective is a mean of that power."""

    def driver_of(cluster: Cluster[Rigid], run: Run) -> Rigid:
        return Malleable(cluster, run, policy) if run.job.elastic else Rigid(cluster, run)

    return Cluster(
        jobs,
        gpus,
        delays,
        run_of=lambda job: policy.run_of(job, delays),
        driver_of=driver_of,
        sharing=Goodput(power),
    ).simulate()
