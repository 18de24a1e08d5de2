"""A plan in the making: rules change the job's status here, add events, and say which workers the job wants.

Rules ask `Draft.view` about the job. Each change of the status replaces the view, so the next rule sees the change.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from pipetransformer_contract.api.job import JobSpec
from pipetransformer_contract.api.status import (
    MAX_CONDITION_MESSAGE,
    Condition,
    ConditionStatus,
    ConditionType,
    JobStatus,
    LayoutSize,
    Reason,
    Resize,
    ResizePhase,
)
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import ResizeReason

from .clock import TurnClock
from .deletions import DECIDED_BEFORE, ENDED, deletion_of, events_of
from .types import Deletion, DisruptionBudget, EventType, NodeFailure, Observed, Plan, PlanEvent
from .view import View
from .workers import Workers

_CONDITION_STATUS = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE, None: ConditionStatus.UNKNOWN}
#: Time after which the control plane has decided whether a silent node is lost. New workers avoid the node until then.
#: For a node that rejected a worker the time begins with the job's next attempt.
DOUBT = timedelta(seconds=60)


class Draft:
    """A plan in the making. Rules replace its status, and never change it in place.

    Attributes:
        view: answers about the job, with the status as the rules left it so far.
        expired: see `Plan`.
        disruption_budget: see `Plan`.
        waits_for_room: see `Plan`.
        spared_ids: ids of workers that the job no longer wants, but whose pods stay for now.
        suspects: why members are lost although their pods look alive, by name of the member.
        failed_devices: see `Plan`.
        failures: see `Plan`.
        unfit: names of nodes that rejected workers, or whose accelerator failed.
        explained_ids: ids of workers whose loss another event explains, so their deletion needs no event.
        conditions_set: types of conditions that a rule set in this turn. The other conditions are from earlier turns.
    """

    def __init__(self, spec: JobSpec, observed: Observed, now: datetime) -> None:
        self.view = View.of(spec, observed, now)
        self.expired = False
        self.spared_ids: frozenset[int] = frozenset()
        self.suspects: dict[str, str] = {}
        self.unfit: frozenset[str] = frozenset()
        self.failures: list[NodeFailure] = []
        self.failed_devices: dict[str, str] = {}
        self.explained_ids: frozenset[int] = frozenset()
        self.conditions_set: set[ConditionType] = set()
        self.disruption_budget: DisruptionBudget | None = None
        self.waits_for_room = False
        self._events: list[PlanEvent] = []
        self._why_deleted: dict[int, str] = {}

    @property
    def spec(self) -> JobSpec:
        return self.view.spec

    @property
    def observed(self) -> Observed:
        return self.view.observed

    @property
    def status(self) -> JobStatus:
        return self.view.status

    @property
    def clock(self) -> TurnClock:
        return self.view.clock

    @property
    def now(self) -> datetime:
        return self.view.now

    def update(self, **fields: Any) -> None:
        """Replaces fields of the status. If it has these values, the view stays, and what it has computed."""
        status = self.view.status
        if any(getattr(status, name) != value for name, value in fields.items()):
            self.view = self.view.with_status(status.model_copy(update=fields))

    def tell(self, reason: Reason, message: str, kind: EventType = EventType.NORMAL) -> None:
        """Adds a Kubernetes event."""
        self._events.append(PlanEvent(kind, reason, message))

    def set_condition(self, kind: ConditionType, status: bool | None, reason: str, message: str = "") -> None:
        """Sets a condition; status None means Unknown. The transition time changes only if the status changes."""
        self.conditions_set.add(kind)
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
        else:
            self.update(conditions=[condition if old is before else old for old in self.status.conditions])

    def warn(self, kind: ConditionType, status: bool | None, reason: Reason, message: str) -> None:
        """Sets a condition, and sends a warning event if the condition's reason is new."""
        if self.status.reason(kind) != reason:
            self.tell(reason, message, EventType.WARNING)
        self.set_condition(kind, status, reason, message)

    def fail(self, reason: str, message: str) -> None:
        """Ends the job as failed."""
        self.set_condition(ConditionType.FAILED, True, reason, message)
        known = Reason(reason) if reason in set(Reason) else Reason.TRAINING_FAILED
        self.tell(known, message, EventType.WARNING)
        self.update(completion_time=self.now)

    def keep_workers(self, ids: Iterable[int], why: str | Mapping[int, str]) -> None:
        """Wants only the workers with these ids. `why` is the reason to delete the others, or one for each id."""
        wanted = set(ids)
        dropped = self.view.wanted_ids - wanted
        self._why_deleted |= {key: why if isinstance(why, str) else why[key] for key in dropped}
        self.update(
            worker_ids=sorted(wanted),
            leaving_ids=[key for key in self.status.leaving_ids if key in wanted],
            surplus_ids=[key for key in self.status.surplus_ids if key in wanted],
            claimed_ids=[key for key in self.status.claimed_ids if key in wanted],
        )

    def enter(self, phase: ResizePhase, to: Layout, reason: ResizeReason, deadline: datetime | None = None) -> None:
        """Writes which phase a resize is in, and when it is undone. A preparation's rule sets its deadline later."""
        prepared, old = self.view.preparation, self.status.generation
        resize = Resize(
            from_=LayoutSize.of(old.layout) if old else None,
            to=LayoutSize.of(to),
            phase=phase,
            reason=reason,
            start_time=prepared.start_time if prepared else self.now,
            deadline=deadline,
        )
        if prepared and phase is ResizePhase.PREPARE:
            kept = prepared.model_dump(include={"replacements", "renewals", "trouble_time"})
            resize = resize.model_copy(update=kept)
        self.update(resize=resize)

    def restart_preparation(self, begin: datetime) -> None:
        """Restarts the time of the present preparation, if there is one: its deadline counts from `begin`."""
        resize = self.view.preparation
        if resize is not None:
            timeout = timedelta(seconds=self.spec.run_policy.resize_timeout_seconds)
            self.update(resize=resize.model_copy(update={"start_time": begin, "deadline": begin + timeout}))

    @property
    def unwanted(self) -> Workers:
        """Workers to delete: those that the job neither wants nor spares, and that are not being deleted yet."""
        others = self.view.workers.without(self.view.wanted_ids | self.spared_ids)
        return others.that(lambda worker: not worker.terminating)

    def plan(self) -> Plan:
        """The finished plan. Which workers it creates and deletes follows from the status and the existing pods."""
        otherwise = ENDED if self.status.finished else DECIDED_BEFORE
        deletions = [deletion_of(one, self._why_deleted.get(one.id, otherwise)) for one in self.unwanted]
        return Plan(
            status=self.status,
            create=self.view.missing_ids,
            delete=tuple(deletions),
            events=(*self._events, *events_of(one for one in deletions if self._is_news(one))),
            requeue_after=self.clock.seconds_left,
            expired=self.expired,
            disruption_budget=self.disruption_budget,
            waits_for_room=self.waits_for_room,
            doubted=dict.fromkeys(self._silent_nodes(), self.now + DOUBT),
            unfit=dict.fromkeys(self.unfit - {""}, max(self.now, self.status.next_resize_time or self.now) + DOUBT),
            failed_devices=self.failed_devices,
            failures=tuple(self.failures),
        )

    def _is_news(self, deletion: Deletion) -> bool:
        return deletion.worker_id not in self.explained_ids and deletion.uid not in self.observed.undeleted

    def _silent_nodes(self) -> set[str]:
        nodes = {self.view.by_name[name].node for name in self.suspects}
        return nodes - {""}  # a late watch may not show yet where a worker is
