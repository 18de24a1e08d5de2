"""The plan while it is being made: rules read the world from it and leave their changes in it.

Each rule sees what the rules before it decided, through `status`; only `Draft.plan` turns the result into an answer.
"""

import hashlib
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from pipetransformer_contract.api.job import JobSpec
from pipetransformer_contract.api.labels import label_errors
from pipetransformer_contract.api.status import (
    MAX_CONDITION_MESSAGE,
    Condition,
    ConditionStatus,
    ConditionType,
    JobStatus,
    LayoutSize,
    QuotaRequest,
    Reason,
    Resize,
    ResizePhase,
)
from pipetransformer_contract.api.template import template_errors
from pipetransformer_contract.choose import Layout, OnPack
from pipetransformer_contract.messages import Generation, Member, ResizeReason

from .quota import quota
from .types import SHORTEST_PACE, EventType, Observed, Plan, PlanEvent, Worker, worker_name

_CONDITION_STATUS = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE, None: ConditionStatus.UNKNOWN}
#: A worker that says nothing for so long may be lost if it beats at the shortest pace; the others have more time.
SILENCE = timedelta(seconds=20)
#: The control plane has made up its mind about a silent node by then. For a node that rejected a worker it begins with
#: the job's next attempt.
DOUBT = timedelta(seconds=60)
#: After a pod's time to end: by then a kubelet has killed it and said so, if anybody can reach it.
OVERDUE = timedelta(minutes=5)
#: What a draft knows of its present status, found once: rules ask for each member, and there are thousands.
_OF_STATUS = ("_wanted_ids", "state_holders", "broken_since", "newest_word", "hears_holders", "hears_waiting")


class Draft:
    """A plan in the making. `status` is replaced, never changed in place.

    Attributes:
        expired: as the plan's.
        min_available: as the plan's.
        keeps_unready: as the plan's.
        waits_for_room: as the plan's.
        spared_ids: of workers that are not wanted any more, and whose pods stay for now.
        suspects: names of members that are lost although their pods look alive, and why.
        broken: by uid, nodes of workers whose accelerator failed.
        unfit: nodes that refused workers which were to join, or whose accelerator failed.
        said: conditions that were set in this turn; the others are as the turn before left them.
    """

    def __init__(self, spec: JobSpec, observed: Observed, now: datetime) -> None:
        self.spec = spec
        self.observed = observed
        self.now = now
        self.status: JobStatus = _until(now, observed.status)
        self.expired = False
        self.spared_ids: frozenset[int] = frozenset()
        self.suspects: dict[str, str] = {}
        self.unfit: frozenset[str] = frozenset()
        self.broken: dict[str, str] = {}
        self.said: set[ConditionType] = set()
        self.min_available: int | None = None
        self.keeps_unready = False
        self.waits_for_room = False
        self.spec_errors = [*label_errors(observed.labels, spec), *template_errors(spec)]
        self._events: list[PlanEvent] = []
        self._wake: list[datetime] = []
        self._by_name = {worker.name: worker for worker in observed.workers}

    def update(self, **fields: Any) -> None:
        """Replaces fields of the status."""
        self.status = self.status.model_copy(update=fields)
        for known in _OF_STATUS:
            self.__dict__.pop(known, None)

    def tell(self, reason: Reason, message: str, kind: EventType = EventType.NORMAL) -> None:
        """Adds a Kubernetes event."""
        self._events.append(PlanEvent(kind, reason, message))

    def wake_at(self, time: datetime) -> None:
        """Asks for another turn at `time`, even if nothing happens."""
        self._wake.append(time)

    def set_condition(self, kind: ConditionType, status: bool | None, reason: str, message: str = "") -> None:
        """Sets a condition, None for unknown; its transition time moves only when its status does."""
        self.said.add(kind)
        value = _CONDITION_STATUS[status]
        before = self.status.condition(kind)
        condition = Condition(
            type=kind,
            status=value,
            reason=reason,
            message=message[:MAX_CONDITION_MESSAGE],
            last_transition_time=self.now
            if before is None or before.status is not value
            else before.last_transition_time,
            observed_generation=self.observed.metadata_generation,
        )
        if before is None:
            self.update(conditions=[*self.status.conditions, condition])
        elif condition != before:
            self.update(conditions=[condition if old is before else old for old in self.status.conditions])

    def fail(self, reason: str, message: str) -> None:
        """Ends the job as failed."""
        self.set_condition(ConditionType.FAILED, True, reason, message)
        known = Reason(reason) if reason in set(Reason) else Reason.TRAINING_FAILED
        self.tell(known, message, EventType.WARNING)
        self.update(completion_time=self.now)

    # -- workers

    def name_of(self, worker_id: int) -> str:
        return worker_name(self.observed.name, worker_id)

    def worker(self, member: Member) -> Worker | None:
        """The worker of a member; None when its pod is gone, or another pod has its name."""
        worker = self._by_name.get(member.name)
        return worker if worker is not None and worker.uid == member.uid else None

    def alive(self, member: Member) -> bool:
        """Whether the member is still wanted and can train."""
        worker = self.worker(member)
        return worker is not None and worker.alive and worker.id in self._wanted_ids

    @cached_property
    def _wanted_ids(self) -> frozenset[int]:
        return frozenset(self.status.worker_ids)

    def is_stuck(self, worker: Worker) -> bool:
        """Whether its pod may stay for days: its node is lost, or it should long be gone, where nodes are not seen."""
        if worker.node_lost or worker.end_time is None:
            return worker.node_lost
        due = worker.end_time + OVERDUE
        if self.now < due:
            self.wake_at(due)
        return self.now >= due

    @property
    def wanted(self) -> list[Worker]:
        """Observed workers that ought to exist, by id."""
        ids = set(self.status.worker_ids)
        return sorted((worker for worker in self.observed.workers if worker.id in ids), key=lambda worker: worker.id)

    @property
    def num_placed(self) -> int:
        """How many wanted workers have a node and keep it: one that leaves holds it for whoever made it leave."""
        leaving = set(self.status.leaving_ids)
        return sum(worker.scheduled for worker in self.wanted if worker.id not in leaving)

    @property
    def joining_ids(self) -> list[int]:
        """Ids of wanted workers that are to join: neither members nor on their way out; some may not exist yet."""
        generation = self.status.generation
        taken = {member.name for member in generation.members} if generation else set()
        leaving = set(self.status.leaving_ids)
        return [key for key in self.status.worker_ids if self.name_of(key) not in taken and key not in leaving]

    @property
    def joiners(self) -> list[Worker]:
        """Living workers that are to join, by id."""
        ids = set(self.joining_ids)
        return [worker for worker in self.wanted if worker.alive and worker.id in ids]

    @property
    def ready_joiners(self) -> list[Member]:
        """Those joiners that are warm and heard, as members to be."""
        return self._ready(self.joiners)

    @property
    def idle_leavers(self) -> list[Member]:
        """Workers that have left and are not given back yet, and that could train again, as members to be."""
        ids = set(self.status.leaving_ids) - quota.lost_ids(self.status, self.observed)
        holders = {member.uid for member in self.state_holders}
        leavers = [worker for worker in self.wanted if worker.id in ids and worker.uid not in holders]
        return self._ready(worker for worker in leavers if worker.alive and not worker.draining)

    def _ready(self, workers: Iterable[Worker]) -> list[Member]:
        """Who was in a generation before is ready again once it says that it waits: until then it has just left, or
        its trainer is one that ends when it has."""
        ready, heard, beats = self.observed.ready, self.observed.heard, self.observed.beats
        return [
            Member(name=worker.name, uid=worker.uid, address=ready[worker.uid].address, node=worker.node)
            for worker in workers
            if worker.uid in ready
            and self.now < heard.get(worker.uid, self.now) + self.patience(worker.uid)
            and (
                (beat := beats.get(worker.uid)) is None or not beat.layout_generation or beat.waiting_after is not None
            )
        ]

    def patience(self, uid: str, silence: timedelta = SILENCE) -> timedelta:
        """How long the worker may be silent, where `silence` is too long for one that beats at the shortest pace."""
        beat = self.observed.beats.get(uid)
        return silence + (beat.pace if beat else self.observed.pace) - SHORTEST_PACE

    def ids_of(self, members: Iterable[Member]) -> list[int]:
        """Those of the wanted workers' ids that belong to `members`."""
        names = {member.name for member in members}
        return [key for key in self.status.worker_ids if self.name_of(key) in names]

    def keep_workers(self, ids: Iterable[int]) -> None:
        """Says which workers ought to exist; the others will be deleted."""
        wanted = set(ids)
        self.update(
            worker_ids=sorted(wanted),
            leaving_ids=[key for key in self.status.leaving_ids if key in wanted],
            surplus_ids=[key for key in self.surplus_ids if key in wanted],
            claimed_ids=[key for key in self.status.claimed_ids if key in wanted],
        )

    @property
    def surplus_ids(self) -> Sequence[int]:
        """Those of the leaving workers that a smaller layout left over. Where an operator before kept none, the newest
        generation's reason tells."""
        known, generation = self.status.surplus_ids, self.status.generation
        if known is not None:
            return known
        return self.status.leaving_ids if generation is not None and self._leaves_surplus(generation.reason) else ()

    def _leaves_surplus(self, reason: ResizeReason) -> bool:
        return reason not in (ResizeReason.FAILURE, ResizeReason.DRAIN) and self.on_pack is not OnPack.HOLD

    def want(self, ids: Sequence[int], count: int, replaced: Sequence[int] = ()) -> None:
        """Wants `ids` and as many new workers as make `count`, besides those that are leaving and those that are to be
        replaced by some of them.

        What exceeds the job's starting size is claimed: it has the lower priority from its creation on. Who replaces a
        worker of the starting size is of it, too. A job with a queue asks it first for what it has no quota for; none
        of them are created before the queue says yes.
        """
        missing = max(0, count - len(ids))
        claimed = set(self.status.claimed_ids)
        size = sum(key not in claimed for key in ids)
        joining = set(self.joining_ids) - claimed
        least = sum(key not in claimed for key in replaced) - sum(key in joining for key in ids) if replaced else 0
        if self.status.generation is None:  # a start has no claims
            least = missing
        base = min(missing, max(0, least, self.status.initial_workers - size))
        if self.status.quota_requests:
            base, missing = self._within_quota(missing, max(0, least), base)
        created = range(self.status.next_worker_id, self.status.next_worker_id + missing)
        if missing:
            if self.status.quota_requests:
                for part, own in ((created[:base], True), (created[base:], False)):
                    self.update(quota_requests=quota.assign(self.status, self.observed, part, own=own))
            self.update(next_worker_id=created.stop, claimed_ids=[*self.status.claimed_ids, *created[base:]])
            self.tell(Reason.WORKERS_CREATED, f"Creating {missing} workers, {len(ids) + missing} in all")
        self.keep_workers([*ids, *created, *self.status.leaving_ids, *replaced])

    def _within_quota(self, missing: int, least: int, most: int) -> tuple[int, int]:
        """How many of `missing` workers may be created now, those of the starting size and all: none as long as quota
        for some of them has to be asked for. At least `least` of them are on quota of the starting size, and up to
        `most` where there is some. What was asked for and is not needed any more is asked for no longer."""
        stuck = {worker.id for worker in self.observed.workers if self.is_stuck(worker)}
        own, claims = (quota.room(self.status, self.observed, stuck, own=kind) for kind in (True, False))
        base = min(missing, max(least, min(own.granted, most)))
        queue, may_create = self.status.quota_requests[0].queue, True
        for room, part, is_own in ((own, base, True), (claims, missing - base, False)):
            may_create = may_create and part <= room.granted
            if part <= room.granted:
                self.update(quota_requests=quota.without_waiting(self.status, own=is_own))
            elif part > room.granted + room.waiting:
                self.ask_queue(queue, part - room.granted - room.waiting, own=is_own)
        if base > own.granted:  # the queue may have no room for it but what claims leave unused
            self.update(quota_requests=quota.give_back(self.status, claims.free - (missing - base), own=False))
        if not may_create:
            return 0, 0
        now = min(base, own.free)
        return now, now + min(missing - base, claims.free)

    def ask_queue(self, queue: str, workers: int, *, own: bool = False) -> None:
        """Makes a request to the queue of that name; `own` if it takes the place of quota of the starting size."""
        status = self.status
        name = f"{self.observed.name}-q{status.next_request_id}"
        request = QuotaRequest(name=name, queue=queue, workers=workers, own=own)
        self.update(quota_requests=[*status.quota_requests, request], next_request_id=status.next_request_id + 1)
        self.tell(Reason.WAITING_FOR_QUOTA, f"Asking {queue} for {workers} workers")

    @property
    def awaits_quota(self) -> bool:
        """Whether the queue has not answered a request yet."""
        return any(not request.admitted for request in self.status.quota_requests)

    # -- what workers say

    def waits(self, member: Member) -> bool:
        """Whether the worker is in no group and waits for a newer generation than the published one."""
        generation, beat = self.status.generation, self.observed.beats.get(member.uid)
        if generation is None or beat is None or beat.waiting_after is None:
            return False
        return beat.waiting_after >= generation.layout_generation

    def has_left(self, member: Member) -> bool:
        """Whether a leaver of the published generation holds nothing any more: then all have voted for it."""
        generation, beat = self.status.generation, self.observed.beats.get(member.uid)
        return generation is not None and beat is not None and beat.layout_generation >= generation.layout_generation

    def hears(self, uid: str) -> bool:
        """Whether the worker said anything lately."""
        heard = self.observed.heard.get(uid)
        return heard is not None and self.now < heard + self.patience(uid)

    @cached_property
    def broken_since(self) -> datetime | None:
        """Since when some holder of state waits for a newer generation than the published one; None while none does."""
        beats = (self.observed.beats[member.uid] for member in self.state_holders if self.waits(member))
        return min((beat.waiting_since for beat in beats if beat.waiting_since is not None), default=None)

    @cached_property
    def newest_word(self) -> datetime | None:
        """When any holder of state last said anything."""
        heard = (self.observed.heard.get(member.uid) for member in self.state_holders)
        return max((time for time in heard if time is not None), default=None)

    @cached_property
    def hears_holders(self) -> bool:
        """Whether any holder of state said anything lately."""
        return any(self.hears(member.uid) for member in self.state_holders)

    @cached_property
    def hears_waiting(self) -> bool:
        """Whether one of them that waits for a newer generation did."""
        return any(self.waits(member) and self.hears(member.uid) for member in self.state_holders)

    # -- changes of the layout

    def publish(
        self, layout: Layout, candidates: Sequence[Member], reason: ResizeReason, broken_before: int = 0
    ) -> None:
        """Publishes the next generation on the first candidates; holders of state that are left over become leavers.

        Candidates that hold state come first, so the leader holds state whenever any member does. A holder of state
        that is no candidate takes no part.
        """
        before, status = self.status.generation, self.status
        number = status.layout_generation + 1
        members = list(candidates[: layout.workers])
        names = [member.name for member in members]
        holders = {member.name for member in self.state_holders}
        leavers = [member for member in candidates[layout.workers :] if member.name in holders]
        report = status.last_report
        generation = Generation(
            job_uid=self.observed.uid,
            layout_generation=number,
            stages=layout.stages,
            pipelines=layout.pipelines,
            members=members,
            leavers=leavers,
            leader=before.leader if before and before.leader in names else names[0],
            nonce=hashlib.sha256(f"{self.observed.uid}/{number}/{self.observed.nonce}".encode()).hexdigest()[:32],
            reason=reason,
            boundary=report.boundary if report else 0,
            boundary_step=report.boundary_step if report else 0,
            confirmed_generation=before.confirmed_generation if before else 0,
            published_time=self.now,
            broken_before=broken_before,
        )
        left, stays = self.ids_of(leavers), set(self.ids_of(members))
        surplus = {*self.surplus_ids, *(left if self._leaves_surplus(reason) else ())}
        self.update(
            generation=generation,
            layout_generation=number,
            leaving_ids=sorted({*status.leaving_ids, *left} - stays),
            surplus_ids=sorted(surplus - stays),
        )
        self.enter(ResizePhase.COMMIT, layout, reason, before.layout if before else None)
        self.tell(
            Reason.GENERATION_PUBLISHED,
            f"Generation {number} ({reason.value}): {layout.pipelines} pipelines of {layout.stages} stages,"
            f" {len(leavers)} workers leave",
        )

    def enter(self, phase: ResizePhase, to: Layout, reason: ResizeReason, old: Layout | None) -> None:
        """Notes where the change of layout stands, and until when; a preparation counts from its first turn."""
        before = self.status.resize
        prepared = before is not None and before.phase is ResizePhase.PREPARE
        start = before.start_time if before is not None and prepared else self.now
        timeout = timedelta(seconds=self.spec.run_policy.resize_timeout_seconds)
        preparing = phase is ResizePhase.PREPARE
        kept = before if preparing else None
        self.update(
            resize=Resize(
                from_=LayoutSize.of(old) if old else None,
                to=LayoutSize.of(to),
                phase=phase,
                reason=reason,
                start_time=start,
                deadline=(start if preparing else self.now) + timeout,
                replacements=kept.replacements if kept else 0,
                renewals=kept.renewals if kept else 0,
                trouble_time=kept.trouble_time if kept else None,
            )
        )

    def prepare_anew(self, begin: datetime) -> None:
        """Gives what is being prepared, if anything is, all its time again, from `begin` on."""
        resize = self.status.resize
        if resize is not None and resize.phase is ResizePhase.PREPARE:
            self.update(resize=resize.model_copy(update={"start_time": begin}))
            self.enter(resize.phase, resize.to.layout, resize.reason, resize.from_.layout if resize.from_ else None)

    @cached_property
    def state_holders(self) -> list[Member]:
        """Living workers with some state, members first: leavers hold theirs until the generation is confirmed, or they
        say that they have left."""
        generation = self.status.generation
        if generation is None:
            return []
        leavers = [] if generation.confirmed else [member for member in generation.leavers if not self.has_left(member)]
        return [member for member in (*generation.members, *leavers) if self.alive(member)]

    @property
    def stopped(self) -> bool:
        """Whether the job is to have no workers: somebody suspended it, or deleted it."""
        return self.spec.suspend or self.observed.kept_by is not None

    @property
    def asleep(self) -> bool:
        """Whether no change is tried yet, after one that failed."""
        return self.status.next_resize_time is not None and self.now < self.status.next_resize_time

    def sleeps(self) -> bool:
        """As `asleep`; then another turn follows once a change may be tried."""
        if self.asleep and self.status.next_resize_time is not None:
            self.wake_at(self.status.next_resize_time)
        return self.asleep

    @property
    def on_pack(self) -> OnPack:
        return self.spec.elastic_policy.on_pack

    # -- the answer

    def plan(self) -> Plan:
        """The answer; creation and deletion follow from the status and the pods alone."""
        wake = min(self._wake, default=None)
        return Plan(
            status=self.status,
            create=() if self.status.finished else self._missing(),
            delete=tuple((worker.name, worker.uid) for worker in self.unwanted),
            events=tuple(self._events),
            requeue_after=None if wake is None else max(0.1, (wake - self.now).total_seconds()),
            expired=self.expired,
            min_available=self.min_available,
            keeps_unready=self.keeps_unready,
            waits_for_room=self.waits_for_room,
            doubted=dict.fromkeys(self._silent_nodes(), self.now + DOUBT),
            unfit=dict.fromkeys(self.unfit, max(self.now, self.status.next_resize_time or self.now) + DOUBT),
            broken=self.broken,
        )

    def _silent_nodes(self) -> set[str]:
        return {worker.node for name in self.suspects if (worker := self._by_name.get(name))}

    def _missing(self) -> tuple[int, ...]:
        return tuple(key for key in self.joining_ids if self.name_of(key) not in self._by_name)

    @property
    def unwanted(self) -> list[Worker]:
        """Workers to delete."""
        stays = {*self.status.worker_ids, *self.spared_ids}
        return [worker for worker in self.observed.workers if worker.id not in stays and not worker.terminating]


def _until(now: datetime, status: JobStatus) -> JobStatus:
    """The status with nothing that has happened after `now`: an operator whose clock is ahead wrote such times, and
    whoever counts from them would wait for as long as the clocks differ."""
    report, generation, resize = status.last_report, status.generation, status.resize
    changes: dict[str, Any] = {}
    if report is not None and report.time > now:
        changes["last_report"] = report.model_copy(update={"time": now})
    if generation is not None and generation.published_time is not None and generation.published_time > now:
        changes["generation"] = generation.model_copy(update={"published_time": now})
    if generation is not None and resize is not None and resize.start_time > now:  # a start may be told to begin later
        changes["resize"] = resize.model_copy(update={"start_time": now})
    return status.model_copy(update=changes) if changes else status
