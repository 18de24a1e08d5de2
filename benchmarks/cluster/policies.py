"""The ways to run the elastic jobs of a cluster that are compared. Rigid jobs run alike in all of them."""

from dataclasses import dataclass, replace
from enum import StrEnum

from pipetransformer_contract.choose import Bounds, OnPack, ReleaseDownTo
from pipetransformer_contract.messages import Offer, StepTime

from .delays import Delays
from .engine import Run
from .scaling import GROWTH, NOTHING_FROZEN, Part, scaling
from .trace import Job


class Decider(StrEnum):
    """What decides between layouts."""

    OPERATOR = "operator"
    POLLUX = "Pollux"  #: `rivals.Goodput`
    ORACLE = "oracle"  #: `rivals.shortest_remaining_first`


@dataclass(frozen=True, slots=True)
class Policy:
    """One way.

    Attributes:
        name: its key in the results.
        words: what it is, for a table.
        decider: who decides.
        freezes: whether layers of the jobs that would freeze do.
        on_pack: the job's `elasticPolicy.onPack`.
        release_down_to: the job's `elasticPolicy.releaseDownTo`.
        one_layout: whether jobs stay in the layout that they start in.
        grows: whether jobs may use more GPUs than their users ask for.
        offload: whether frozen layers leave the GPU once the cache has their outputs.
    """

    name: str
    words: str
    decider: Decider = Decider.OPERATOR
    freezes: bool = True
    on_pack: OnPack = OnPack.RELEASE
    release_down_to: ReleaseDownTo = ReleaseDownTo.PRESENT_STEP
    one_layout: bool = False
    grows: bool = False
    offload: bool = True

    def run_of(self, job: Job, delays: Delays, slowness: float = 1.0) -> Run:
        """What the engine keeps of a job, whose steps take so many times as long as declared."""
        if not job.elastic:
            return Run(job, job.gpus, None, [Part(max(1, round(job.seconds)), NOTHING_FROZEN)])
        scales = scaling(job.gpus, delays.pause, offload=self.offload, slowness=slowness)
        needs = scales.start.stages if self.decider is Decider.POLLUX else job.gpus
        return Run(job, needs, scales, scales.parts(job if self.freezes else replace(job, freezes=False)))

    def most_workers(self, gpus: int) -> int:
        """Workers that a job whose user asks for `gpus` may have at most."""
        return gpus * (GROWTH if self.grows else 1)

    def offers(self, run: Run) -> list[Offer]:
        """What the job's leader offers now."""
        assert run.scaling is not None
        offers = run.scaling.offers(run.frozen)
        if not self.one_layout:
            return list(offers)
        start = run.scaling.start
        time = StepTime(pipelines=start.pipelines, seconds=run.scaling.seconds(run.frozen, start))
        return [one.model_copy(update={"step_seconds": [time]}) for one in offers if one.stages == start.stages]

    def bounds(self, run: Run) -> Bounds:
        """Limits of the job's layouts."""
        assert run.scaling is not None
        by_start = self.release_down_to is ReleaseDownTo.STARTING_STEP
        most = self.most_workers(run.job.gpus)
        return Bounds(
            initial=run.scaling.start,
            min_workers=1,
            max_workers=most,
            min_pipelines=1,
            max_pipelines=most,
            bytes_budget=0,
            starting_step_seconds=run.scaling.starting_seconds if by_start else None,
        )


STATIC = Policy("static", "first come, first served; nothing freezes", freezes=False, one_layout=True)
FREEZE = Policy("freeze", "the same, layers freeze, stages are cut again, with a cache", one_layout=True)
WIDEN = Policy("widen", "`onPack: Widen`", on_pack=OnPack.WIDEN)
RELEASE = Policy("release", "`onPack: Release`")
RELEASE_STARTING = Policy(
    "release_starting",
    "`onPack: Release`, `releaseDownTo: StartingStep`",
    release_down_to=ReleaseDownTo.STARTING_STEP,
)
AUTO = Policy("auto", "`onPack: Auto`, up to twice the GPUs", on_pack=OnPack.AUTO, grows=True)
AUTO_RESIDENT = replace(AUTO, name="auto_resident", words="the same with `cache.offloadFrozen: Never`", offload=False)
POLLUX = Policy(
    "pollux", "Pollux-like: elastic by goodput, nothing freezes", decider=Decider.POLLUX, freezes=False, grows=True
)
POLLUX_FREEZE = Policy("pollux_freeze", "Pollux-like, layers freeze", decider=Decider.POLLUX, grows=True)
SHORTEST = Policy(
    "shortest_first",
    "the shortest remaining first: knows all durations, moves jobs at no cost; nothing freezes",
    decider=Decider.ORACLE,
    freezes=False,
    one_layout=True,
)
POLICIES = (STATIC, FREEZE, WIDEN, RELEASE, RELEASE_STARTING, AUTO, AUTO_RESIDENT, POLLUX, POLLUX_FREEZE, SHORTEST)
