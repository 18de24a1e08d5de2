"""Questions that rules ask about a job, answered from its spec, its status and what the operator observed.

A view never changes. A draft replaces its view with each change of the status, so a rule sees what earlier rules of
the same turn decided.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from pipetransformer_contract.api.job import JobSpec
from pipetransformer_contract.api.labels import label_errors
from pipetransformer_contract.api.status import JobStatus, LastReport, Resize, ResizePhase
from pipetransformer_contract.api.template import template_errors
from pipetransformer_contract.choose import OnPack
from pipetransformer_contract.messages import (
    DurableCheckpoint,
    Generation,
    Member,
    Offer,
    Report,
    ResizeReason,
    Upcoming,
)
from pipetransformer_contract.wire import Wire

from .clock import TurnClock
from .members import names
from .quota import balance, requests
from .types import NEVER, SHORTEST_PACE, Observed, Worker, worker_name
from .workers import Workers

#: A worker with the shortest pace of heartbeats may be lost after this silence. At a longer pace it has more time.
SILENCE = timedelta(seconds=20)
#: If peers say that they lost a member, and it is silent for this long, it is lost although its pod looks alive. A
#: member that no peer names has `SILENCE`.
NAMED_SILENCE = timedelta(seconds=10)
#: A reachable kubelet has killed a pod and reported it at the latest this long after the pod's grace period.
OVERDUE = timedelta(minutes=5)


@dataclass(frozen=True)
class View:
    """Answers about one job at one moment. Lists of workers are sorted by id.

    Attributes:
        spec: the job's spec.
        observed: what the operator knows about the job and its pods.
        status: the job's status, with the changes that rules made in this turn.
        clock: the time of this turn. It notes when the next turn is due.
        workers: all workers whose pods exist.
        by_name: the same workers by their names.
        spec_errors: what is wrong with the job's labels and pod template; empty if nothing is.
    """

    spec: JobSpec
    observed: Observed
    status: JobStatus
    clock: TurnClock
    workers: Workers
    by_name: Mapping[str, Worker]
    spec_errors: Sequence[object]

    @classmethod
    def of(cls, spec: JobSpec, observed: Observed, now: datetime) -> "View":
        """The view at the start of a turn."""
        errors = [*label_errors(observed.labels, spec), *template_errors(spec)]
        by_name = {worker.name: worker for worker in observed.workers}
        return cls(
            spec, observed, _cap_times(now, observed.status), TurnClock(now), Workers(observed.workers), by_name, errors
        )

    def with_status(self, status: JobStatus) -> "View":
        """The same view with another status."""
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
    def active(self) -> bool:
        """Whether this operator manages the job, and it has not stopped or ended."""
        return self.spec.managed and not (self.stopped or self.status.finished)

    @property
    def preparation(self) -> Resize | None:
        """The resize or start that workers are prepared for; None without one."""
        resize = self.status.resize
        return resize if resize is not None and resize.phase is ResizePhase.PREPARE else None

    @property
    def prepared_resize(self) -> Resize | None:
        """The resize of a job that trains, while workers are prepared for it; None without one."""
        return self.preparation if self.status.generation is not None else None

    def counted_from(self, time: datetime) -> datetime:
        """`time`, or when this operator began to listen, whichever is later: it must first hear from workers."""
        return max(time, self.observed.listening_since)

    @property
    def asleep(self) -> bool:
        """Whether the job waits before its next attempt to start or resize, because the last one failed."""
        return self.clock.is_ahead(self.status.next_resize_time)

    def asleep_and_wakes(self) -> bool:
        """Like `asleep`, and asks for another turn at the end of the wait."""
        return self.clock.awaits(self.status.next_resize_time)

    @property
    def share_workers(self) -> int | None:
        """The job's share in workers, from `allocate`. None without one, or if it makes room for other owners."""
        share = self.status.share
        return None if share is None or share.for_others else share.workers

    @property
    def boundary(self) -> int:
        """Number of frozen layers, according to the leader's last report."""
        report = self.status.last_report
        return report.boundary if report else 0

    @property
    def offers(self) -> Sequence[Offer]:
        """Layouts that the leader last offered."""
        report = self.status.last_report
        return report.offers if report else ()

    @property
    def report(self) -> Report | None:
        """The leader's newest report, before the status has it. None without one, or if an earlier job of the same name
        sent it."""
        report = self.observed.report
        return report if report is not None and report.job_uid == self.observed.uid else None

    @property
    def newest_step(self) -> int:
        """Number of committed steps, as far as the operator knows. The workers may have made a few more."""
        return max((report.step for report in filter(None, (self.report, self.status.last_report))), default=0)

    @property
    def present_report(self) -> LastReport | None:
        """The last report in the status; None if it is not of the published generation."""
        report, generation = self.status.last_report, self.status.generation
        if report is None or generation is None or report.layout_generation != generation.layout_generation:
            return None
        return report

    @property
    def generation(self) -> Generation:
        """The published generation. Ask only about a job that has one; `status.generation` may be None."""
        generation = self.status.generation
        assert generation is not None
        return generation

    @property
    def published_time(self) -> datetime:
        """When the published generation was published."""
        published = self.generation.published_time
        assert published is not None
        return published

    @property
    def awaited_level(self) -> Upcoming | None:
        """The next level's model, if the job makes no step until it has workers for that model; otherwise None."""
        report = self.present_report
        return report.upcoming if report and report.upcoming and report.upcoming.waits else None

    def shards_of(self, checkpoint: DurableCheckpoint | None) -> int:
        """How many pipelines the data order of a checkpoint allows; without one, as many as the job may have now."""
        shards = checkpoint.num_shards if checkpoint else None
        return shards or self.status.num_shards or self.spec.max_pipelines

    @property
    def awaits_quota(self) -> bool:
        """Whether the queue has not answered a request yet."""
        return bool(requests.waiting(self.status))

    # -- workers

    def name_of(self, worker_id: int) -> str:
        return worker_name(self.observed.name, worker_id)

    def worker(self, member: Member) -> Worker | None:
        """The worker of a member; None if the member's pod is gone, or another pod has its name."""
        worker = self.by_name.get(member.name)
        return worker if worker is not None and worker.uid == member.uid else None

    def workers_of(self, members: Iterable[Member]) -> list[Worker]:
        """The workers of those members whose pods exist."""
        return list(filter(None, map(self.worker, members)))

    def alive(self, member: Member) -> bool:
        """Whether the member is still wanted and can train."""
        worker = self.worker(member)
        return worker is not None and worker.alive and worker.id in self.wanted_ids

    def living(self, members: Iterable[Member]) -> list[Member]:
        """Those members that are still wanted and can train."""
        return list(filter(self.alive, members))

    def is_stuck(self, worker: Worker) -> bool:
        """Whether the worker's pod may stay for days: its node is lost, or it should have ended some minutes ago."""
        if worker.node_lost or worker.end_time is None:
            return worker.node_lost
        return self.clock.reached(worker.end_time + OVERDUE)

    @cached_property
    def wanted_ids(self) -> frozenset[int]:
        """Ids of workers that the job wants. Some may not exist yet."""
        return frozenset(self.status.worker_ids)

    @cached_property
    def leaving_ids(self) -> frozenset[int]:
        """Ids of leavers of earlier generations and of the published one whose pods the job still keeps."""
        return frozenset(self.status.leaving_ids)

    @cached_property
    def claimed_ids(self) -> frozenset[int]:
        """Ids of workers beyond the starting size."""
        return frozenset(self.status.claimed_ids)

    @cached_property
    def wanted(self) -> Workers:
        """Workers that the job wants and that exist."""
        return Workers(sorted(self.workers.among(self.wanted_ids), key=lambda worker: worker.id))

    @cached_property
    def claimed(self) -> Workers:
        """Wanted workers beyond the starting size."""
        return self.wanted.among(self.claimed_ids)

    @property
    def num_placed(self) -> int:
        """How many wanted workers have a node. Leaving workers do not count, because their nodes become free."""
        return len(self.wanted.without(self.leaving_ids).placed)

    @property
    def members(self) -> Sequence[Member]:
        """Members of the published generation; empty if none is published."""
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
        """Ids of wanted workers that are neither members nor leaving: they will join. Some may not exist yet."""
        known = self.status.worker_ids
        return [key for key in known if key not in self.leaving_ids and self.name_of(key) not in self.member_names]

    @cached_property
    def joiners(self) -> Workers:
        """Workers that will join, exist, and can train."""
        return self.wanted.among(frozenset(self.joining_ids)).alive

    @cached_property
    def missing_ids(self) -> tuple[int, ...]:
        """Ids of workers that will join and do not exist yet."""
        return tuple(key for key in self.joining_ids if self.name_of(key) not in self.by_name)

    @property
    def vanished_ids(self) -> frozenset[int]:
        """Ids of workers that would join, may have been members, and are gone, although no turn saw their pods end."""
        return frozenset(key for key in self.missing_ids if key < self.status.first_new_worker_id)

    @cached_property
    def ready_joiners(self) -> list[Member]:
        """Joiners that have warmed up and still send heartbeats, as members for the next generation."""
        return self._ready(self.joiners)

    @property
    def joiners_placed(self) -> bool:
        """Whether each worker that will join exists and has a node, and no quota is missing."""
        return not self.awaits_quota and len(self.joiners.placed) == len(self.joining_ids)

    @property
    def joiners_startable(self) -> bool:
        """Whether no joiner's node has failed to set up its pod or start its containers."""
        return not self.joiners.that(lambda worker: worker.cannot_start)

    @property
    def start_complete(self) -> bool:
        """Whether all workers of a start have nodes, and no node fails to start them."""
        return bool(self.joining_ids) and self.joiners_placed and self.joiners_startable

    @property
    def idle_leavers(self) -> list[Member]:
        """Leavers without state whose pods still run and could train again, as members for the next generation."""
        ids = self.leaving_ids - balance.lost_ids(self.status, self.observed)
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
        """Whether a worker that has warmed up still sends heartbeats, and is in no process group.

        A worker that was in a generation before must say that it waits for a newer one. Until then its trainer may end.
        """
        beat = self.observed.beat(uid)
        free = not beat.layout_generation or beat.waiting_after is not None
        return free and self.now < self.observed.heard.get(uid, self.now) + self.patience(uid)

    def ids_of(self, members: Iterable[Member]) -> list[int]:
        """Ids of the wanted workers that are among `members`."""
        known = names(members)
        return [key for key in self.status.worker_ids if self.name_of(key) in known]

    def leaves_surplus(self, reason: ResizeReason) -> bool:
        """Whether the job releases the leavers of a generation that was published for this reason."""
        return reason not in (ResizeReason.FAILURE, ResizeReason.DRAIN) and self.on_pack is not OnPack.HOLD

    # -- what workers say

    def patience(self, uid: str, silence: timedelta = SILENCE) -> timedelta:
        """How long this worker may be silent: `silence` at the shortest pace of heartbeats, longer at a slower pace."""
        return silence + self.observed.beat(uid).pace - SHORTEST_PACE

    def waits(self, member: Member) -> bool:
        """Whether the worker is in no process group and waits for a newer generation than the published one."""
        after = self.observed.beat(member.uid).waiting_after
        return after is not None and after >= self.status.layout_generation

    def has_left(self, member: Member) -> bool:
        """Whether this leaver of the published generation has dropped its state, because the vote committed it."""
        return self.observed.beat(member.uid).layout_generation >= self.status.layout_generation

    def hears(self, uid: str, silence: timedelta = SILENCE) -> bool:
        """Whether the worker sent anything recently enough not to count as silent; see `patience`."""
        return self.now < self.observed.heard.get(uid, NEVER) + self.patience(uid, silence)

    @cached_property
    def state_holders(self) -> list[Member]:
        """Workers that can train and hold state, members first.

        Leavers count until the leader confirms the generation, or until they say that they have left."""
        generation = self.status.generation
        if generation is None:
            return []
        leavers = [] if generation.confirmed else [one for one in generation.leavers if not self.has_left(one)]
        return self.living([*generation.members, *leavers])

    @cached_property
    def broken_since(self) -> datetime | None:
        """When a holder of state first began to wait for a newer generation than the published one, or None."""
        beats = (self.observed.beat(member.uid) for member in filter(self.waits, self.state_holders))
        return min(filter(None, (beat.waiting_since for beat in beats)), default=None)

    @cached_property
    def newest_word(self) -> datetime:
        """When a holder of state last sent anything."""
        return max((self.observed.heard.get(member.uid, NEVER) for member in self.state_holders), default=NEVER)

    @cached_property
    def hears_holders(self) -> bool:
        """Whether at least one holder of state is not silent."""
        return any(self.hears(member.uid) for member in self.state_holders)

    @cached_property
    def hears_waiting(self) -> bool:
        """Whether at least one holder of state waits for a newer generation and is not silent."""
        return any(self.waits(member) and self.hears(member.uid) for member in self.state_holders)


def _cap_times(now: datetime, status: JobStatus) -> JobStatus:
    """The status with `now` in place of later times.

    An operator whose clock was ahead wrote the later times. A wait that counts from them would take too long."""
    times: dict[str, Any] = {
        "last_report": _not_after(now, status.last_report, "time"),
        "generation": _not_after(now, status.generation, "published_time"),
    }
    if status.generation is not None:  # a start may be told to begin later
        times["resize"] = _not_after(now, status.resize, "start_time")
    return status.model_copy(update=times)


def _not_after(now: datetime, part: Wire | None, field: str) -> Wire | None:
    """A part of the status, with `now` in its time field if that field holds a later time."""
    return part if part is None or getattr(part, field) <= now else part.model_copy(update={field: now})
