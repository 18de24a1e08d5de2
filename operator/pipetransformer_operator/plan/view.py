"""What is: one look at a job, and the questions that rules ask about it.

Nothing here changes anything. A draft replaces its view with each change of the status, so a rule sees what the rules
before it decided.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from pipetransformer_contract.api.job import JobSpec
from pipetransformer_contract.api.labels import label_errors
from pipetransformer_contract.api.status import ConditionType, JobStatus, Resize, ResizePhase
from pipetransformer_contract.api.template import template_errors
from pipetransformer_contract.choose import OnPack
from pipetransformer_contract.messages import Member, Offer, ResizeReason, Upcoming
from pipetransformer_contract.wire import Wire

from .clock import Clock, latest
from .members import names
from .quota import quota, requests
from .types import SHORTEST_PACE, Observed, Worker, worker_name
from .workers import Workers

#: A worker that is silent for this long may be lost if it beats at the shortest pace; others have more time.
SILENCE = timedelta(seconds=20)
#: By then a kubelet has killed a pod whose time to end is over and said so, if it can be reached.
OVERDUE = timedelta(minutes=5)


@dataclass(frozen=True)
class View:
    """Answers about one job at one moment. Lists of workers are by id.

    Attributes:
        spec: of the job.
        observed: what was seen of the job and its pods.
        status: as the rules so far left it.
        clock: the time, and who waits for a later one.
        workers: all that are not gone.
        by_name: the same by their names.
        spec_errors: what is wrong with labels and pod template.
    """

    spec: JobSpec
    observed: Observed
    status: JobStatus
    clock: Clock
    workers: Workers
    by_name: Mapping[str, Worker]
    spec_errors: Sequence[object]

    @classmethod
    def of(cls, spec: JobSpec, observed: Observed, now: datetime) -> "View":
        """The view at the start of a turn."""
        errors = [*label_errors(observed.labels, spec), *template_errors(spec)]
        by_name = {worker.name: worker for worker in observed.workers}
        return cls(spec, observed, _until(now, observed.status), Clock(now), Workers(observed.workers), by_name, errors)

    def with_status(self, status: JobStatus) -> "View":
        """The same look, after a rule changed the status."""
        return replace(self, status=status)

    @property
    def now(self) -> datetime:
        return self.clock.now

    # -- the job

    @property
    def on_pack(self) -> OnPack:
        return self.spec.elastic_policy.on_pack

    @property
    def stopped(self) -> bool:
        """Whether the job is to have no workers, because a user suspended or deleted it."""
        return self.spec.suspend or self.observed.kept_by is not None

    @property
    def suspended(self) -> bool:
        """Whether the status says that the job is suspended."""
        return self.status.is_true(ConditionType.SUSPENDED)

    @property
    def preparation(self) -> Resize | None:
        """The resize or start that workers are prepared for; None without one."""
        resize = self.status.resize
        return resize if resize is not None and resize.phase is ResizePhase.PREPARE else None

    def counted_from(self, time: datetime) -> datetime:
        """`time`, or the start of this operator if that was later: it first has to hear what its predecessor knew."""
        return max(time, self.observed.since or time)

    @property
    def asleep(self) -> bool:
        """Whether the job waits before the next attempt, after one that failed."""
        return self.clock.is_ahead(self.status.next_resize_time)

    def sleeps(self) -> bool:
        """As `asleep`; another turn follows at the end of the wait."""
        return self.clock.awaits(self.status.next_resize_time)

    @property
    def granted(self) -> int | None:
        """Workers that jobs share out to this one; None if they share nothing, or make room for pods of others."""
        share = self.status.share
        return None if share is None or share.for_others else share.workers

    @property
    def boundary(self) -> int:
        """Frozen layers by the last report."""
        report = self.status.last_report
        return report.boundary if report else 0

    @property
    def offers(self) -> Sequence[Offer]:
        """Layouts that the leader last offered."""
        report = self.status.last_report
        return report.offers if report else ()

    @property
    def awaited_level(self) -> Upcoming | None:
        """The larger model that the job makes no step without, because its present layout does not hold it."""
        report, generation = self.status.last_report, self.status.generation
        if report is None or report.upcoming is None or not report.upcoming.waits or generation is None:
            return None
        return report.upcoming if report.layout_generation == generation.layout_generation else None

    @property
    def awaits_quota(self) -> bool:
        """Whether the queue has not answered a request yet."""
        return bool(requests.waiting(self.status))

    # -- workers

    def name_of(self, worker_id: int) -> str:
        return worker_name(self.observed.name, worker_id)

    def worker(self, member: Member) -> Worker | None:
        """The worker of a member; None when its pod is gone, or another pod has its name."""
        worker = self.by_name.get(member.name)
        return worker if worker is not None and worker.uid == member.uid else None

    def workers_of(self, members: Iterable[Member]) -> list[Worker]:
        """The workers of those members whose pods are there."""
        return list(filter(None, map(self.worker, members)))

    def alive(self, member: Member) -> bool:
        """Whether the member is still wanted and can train."""
        worker = self.worker(member)
        return worker is not None and worker.alive and worker.id in self.wanted_ids

    def living(self, members: Iterable[Member]) -> list[Member]:
        """Those members that are still wanted and can train."""
        return list(filter(self.alive, members))

    def is_stuck(self, worker: Worker) -> bool:
        """Whether its pod may stay for days: its node is lost, or it should be gone by now and nodes are not seen."""
        if worker.node_lost or worker.end_time is None:
            return worker.node_lost
        return self.clock.reached(worker.end_time + OVERDUE)

    @cached_property
    def wanted_ids(self) -> frozenset[int]:
        """Ids of workers that ought to exist."""
        return frozenset(self.status.worker_ids)

    @cached_property
    def leaving_ids(self) -> frozenset[int]:
        """Ids of workers that left a generation and still exist."""
        return frozenset(self.status.leaving_ids)

    @cached_property
    def claimed_ids(self) -> frozenset[int]:
        """Ids of workers beyond the starting size."""
        return frozenset(self.status.claimed_ids)

    @cached_property
    def wanted(self) -> Workers:
        """Workers that ought to exist, and do."""
        return Workers(sorted(self.workers.among(self.wanted_ids), key=lambda worker: worker.id))

    @cached_property
    def claimed(self) -> Workers:
        """Those of the wanted workers that are beyond the starting size."""
        return self.wanted.among(self.claimed_ids)

    @property
    def num_placed(self) -> int:
        """How many wanted workers have a node and keep it; a leaving worker holds its node for another owner."""
        return len(self.wanted.without(self.leaving_ids).placed)

    @property
    def members(self) -> Sequence[Member]:
        """Members of the published generation; none without one."""
        return self.status.generation.members if self.status.generation else ()

    @cached_property
    def member_names(self) -> frozenset[str]:
        """Names of the published generation's members."""
        return names(self.members)

    @cached_property
    def claimed_names(self) -> frozenset[str]:
        """Names of workers beyond the starting size."""
        return self.names_of(self.claimed_ids)

    def names_of(self, worker_ids: Iterable[int]) -> frozenset[str]:
        """Names of the workers with these ids."""
        return frozenset(map(self.name_of, worker_ids))

    @property
    def all_alive(self) -> bool:
        """Whether all members of the published generation are wanted and can train."""
        return all(map(self.alive, self.members))

    @cached_property
    def joining_ids(self) -> list[int]:
        """Ids of wanted workers that are to join: neither members nor leaving. Some may not exist yet."""
        ids = (key for key in self.status.worker_ids if key not in self.leaving_ids)
        return [key for key in ids if self.name_of(key) not in self.member_names]

    @cached_property
    def joiners(self) -> Workers:
        """Living workers that are to join."""
        return self.wanted.among(frozenset(self.joining_ids)).alive

    @cached_property
    def missing_ids(self) -> tuple[int, ...]:
        """Ids of workers that are to join and do not exist yet."""
        return tuple(key for key in self.joining_ids if self.name_of(key) not in self.by_name)

    @cached_property
    def ready_joiners(self) -> list[Member]:
        """Joiners that are warm and heard, as members to be."""
        return self._ready(self.joiners)

    @property
    def joiners_placed(self) -> bool:
        """Whether each worker that is to join may exist, does, and has a node."""
        return not self.awaits_quota and len(self.joiners.placed) == len(self.joining_ids)

    @property
    def joiners_startable(self) -> bool:
        """Whether the nodes of all joiners can set up their pods and start their containers."""
        return not self.joiners.that(lambda worker: worker.cannot_start)

    @property
    def start_complete(self) -> bool:
        """Whether all workers of a start have their nodes, and can start there."""
        return bool(self.joining_ids) and self.joiners_placed and self.joiners_startable

    @property
    def idle_leavers(self) -> list[Member]:
        """Workers that have left, still exist and could train again, as members to be."""
        ids = self.leaving_ids - quota.lost_ids(self.status, self.observed)
        holders = {member.uid for member in self.state_holders}
        return self._ready(self.wanted.among(ids).staying.that(lambda worker: worker.uid not in holders))

    def _ready(self, workers: Iterable[Worker]) -> list[Member]:
        ready = self.observed.ready
        return [
            Member(name=worker.name, uid=worker.uid, address=ready[worker.uid].address, node=worker.node)
            for worker in workers
            if worker.uid in ready and self._could_join(worker.uid)
        ]

    def _could_join(self, uid: str) -> bool:
        """Whether a warm worker is heard and in no group. One that was in a generation before has to say that it waits:
        until then it has just left, or its trainer ends after it left."""
        beat = self.observed.beat(uid)
        free = not beat.layout_generation or beat.waiting_after is not None
        return free and self.now < self.observed.heard.get(uid, self.now) + self.patience(uid)

    def ids_of(self, members: Iterable[Member]) -> list[int]:
        """Those of the wanted workers' ids that belong to `members`."""
        known = names(members)
        return [key for key in self.status.worker_ids if self.name_of(key) in known]

    def leaves_surplus(self, reason: ResizeReason) -> bool:
        """Whether leavers of a generation that has this reason are released."""
        return reason not in (ResizeReason.FAILURE, ResizeReason.DRAIN) and self.on_pack is not OnPack.HOLD

    # -- what workers say

    def patience(self, uid: str, silence: timedelta = SILENCE) -> timedelta:
        """How long the worker may be silent, where `silence` is too long for one that beats at the shortest pace."""
        return silence + self.observed.beat(uid).pace - SHORTEST_PACE

    def waits(self, member: Member) -> bool:
        """Whether the worker is in no group and waits for a newer generation than the published one."""
        generation, after = self.status.generation, self.observed.beat(member.uid).waiting_after
        return generation is not None and after is not None and after >= generation.layout_generation

    def has_left(self, member: Member) -> bool:
        """Whether a leaver of the published generation holds no state any longer, because all workers voted for it."""
        generation = self.status.generation
        return (
            generation is not None and self.observed.beat(member.uid).layout_generation >= generation.layout_generation
        )

    def hears(self, uid: str) -> bool:
        """Whether the worker said anything lately."""
        heard = self.observed.heard.get(uid)
        return heard is not None and self.now < heard + self.patience(uid)

    @cached_property
    def state_holders(self) -> list[Member]:
        """Living workers with some state, members first: leavers hold theirs until the generation is confirmed, or they
        say that they have left."""
        generation = self.status.generation
        if generation is None:
            return []
        leavers = [] if generation.confirmed else [one for one in generation.leavers if not self.has_left(one)]
        return self.living([*generation.members, *leavers])

    @cached_property
    def broken_since(self) -> datetime | None:
        """Since when some holder of state waits for a newer generation than the published one; None while none does."""
        beats = (self.observed.beat(member.uid) for member in filter(self.waits, self.state_holders))
        return min((beat.waiting_since for beat in beats if beat.waiting_since is not None), default=None)

    @cached_property
    def newest_word(self) -> datetime | None:
        """When any holder of state last said anything."""
        return latest(self.observed.heard.get(member.uid) for member in self.state_holders)

    @cached_property
    def hears_holders(self) -> bool:
        """Whether any holder of state said anything lately."""
        return any(self.hears(member.uid) for member in self.state_holders)

    @cached_property
    def hears_waiting(self) -> bool:
        """Whether a holder of state that waits for a newer generation said anything lately."""
        return any(self.waits(member) and self.hears(member.uid) for member in self.state_holders)


def _until(now: datetime, status: JobStatus) -> JobStatus:
    """The status without times after `now`. An operator whose clock was ahead wrote them; counting from them would take
    as long as the clocks differ."""
    times: dict[str, Any] = {
        "last_report": _not_after(now, status.last_report, "time"),
        "generation": _not_after(now, status.generation, "published_time"),
    }
    if status.generation is not None:  # a start may be told to begin later
        times["resize"] = _not_after(now, status.resize, "start_time")
    return status.model_copy(update=times)


def _not_after(now: datetime, part: Wire | None, field: str) -> Wire | None:
    """A part of the status, with `now` in place of a later time in the field."""
    time = getattr(part, field, None)
    return part if part is None or time is None or time <= now else part.model_copy(update={field: now})
