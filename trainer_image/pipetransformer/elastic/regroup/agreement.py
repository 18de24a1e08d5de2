"""The participants of a regroup agree on a plan: each tells the leader what it holds, and the leader plans for all.

They exchange messages in the generation's store. The leader looks up what the plan needs, and refuses a generation
whose members see different data.
"""

import contextlib
import math
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from pipetransformer.elastic.transport.barrier import Work
from pipetransformer.elastic.transport.groups import GenerationGroups, Store
from pipetransformer.elastic.transport.watchdog import Deadline
from pipetransformer.errors import SpecError, WorkersDifferError
from pipetransformer.partition import Cut, ModelCosts
from pipetransformer.record import newest_generation
from pipetransformer.state.control import Control
from pipetransformer.state.worker_state import WorkerState
from pipetransformer_contract.messages import Generation

from .state_map import StateMap
from .tools import RegroupTools, Unsettled
from .transfer_plan import DurablePoint, Inventory, OtherState, TransferPlan, differing_members, make_plan

T = TypeVar("T")

#: Key of the leader's plan in the generation's store. The value is empty if the leader first has to read the storage.
#: It is `_NO_PLAN` and a reason if there is no plan.
_PLAN = "plan"
_NO_PLAN = "none: "
#: Key of the plan, if the leader has read the storage for it.
_PLAN_BY_STORAGE = "plan/by-storage"


class RegroupError(RuntimeError):
    """This worker did not commit the generation. Its state is unchanged.

    Attributes:
        in_doubt: the state of the new role, if the vote broke after this worker had assembled it. Other workers may
            have committed it. Otherwise None.
    """

    def __init__(self, message: str, in_doubt: WorkerState | None = None) -> None:
        super().__init__(message)
        self.in_doubt = in_doubt


@dataclass(frozen=True, slots=True)
class Agreement:
    """Lets this worker agree with the other participants of one attempt on a plan.

    Attributes:
        tools: what this worker regroups with.
        generation: the generation.
        rank: rank among the participants: the members come first, then the leavers.
        store: key-value store that all participants share.
        groups: process groups of the generation.
        deadline: when the watchdog ends the attempt.
    """

    tools: RegroupTools
    generation: Generation
    rank: int
    store: Store
    groups: GenerationGroups
    deadline: Deadline

    @property
    def leads(self) -> bool:
        """Whether this worker is the generation's leader."""
        members = self.generation.members
        return self.rank < len(members) and members[self.rank].name == self.generation.leader

    def reach(
        self, state: WorkerState, unsettled: Unsettled, only_in_doubt: Collection[int], doubted: WorkerState | None
    ) -> TransferPlan:
        """Tell the leader what this worker holds, and return the leader's plan. All participants call this.

        Args:
            state: what this worker holds.
            unsettled: work that other workers may have committed.
            only_in_doubt: units of `state` that the pending steps did not train, because they come from the state in
                doubt.
            doubted: the state in doubt if it is another model than `state`, at the same step; otherwise None.

        Raises:
            RegroupError: the leader has refused the generation.
            WorkersDifferError: raised on the leader only, as by `regroup`.
        """
        # Tell what this worker holds.
        tools, store, control = self.tools, self.store, state.control
        inventory = Inventory(
            units=sorted(state.units),
            copies=sorted(state.copies),
            step=control.step if state.units else -1,
            pending=unsettled.pending,
            pending_steps=unsettled.pending_steps,
            only_in_doubt=sorted(only_in_doubt),
            control=control.to_dict(),
            data=tools.job.data_digest,
            first_sums=tools.job.first_sums,
            inputs_change=tools.job.inputs_change,
            mirrors=tools.mirrors.describe(),
            in_doubt=None if doubted is None else _as_other_state(doubted),
            read_ahead={index: read.fell_step for index, read in dict(tools.read_ahead.units).items()},
        )
        store.set(f"inventory/{self.rank}", inventory.model_dump_json())
        # Make the plan, or read that of the leader. It may have to read the storage first.
        if self.leads:
            return self._plan_for_all()
        content = store.get(_PLAN).decode()
        if content.startswith(_NO_PLAN):
            raise RegroupError(content.removeprefix(_NO_PLAN))
        if not content:
            self.pass_barrier(None)
            content = store.get(_PLAN_BY_STORAGE).decode()
        plan = TransferPlan.model_validate_json(content)
        if plan.inputs_change:
            tools.job.expect_changes()
        return plan

    def _plan_for_all(self) -> TransferPlan:
        """On the leader, make the plan, and put it into the store for the other participants."""
        # Read and check what the participants hold.
        generation, store = self.generation, self.store
        total = len(generation.members) + len(generation.leavers)
        inventories = [
            Inventory.model_validate_json(content)
            for content in store.multi_get([f"inventory/{other}" for other in range(total)])
        ]
        self._forget([f"inventory/{other}" for other in range(total)])
        self._compare_data(inventories)
        # Make the plan. If any participant saw inputs change, no worker caches.
        if inputs_change := any(each.inputs_change for each in inventories):
            self.tools.job.expect_changes()
        sources = _LeadersSources(self)
        plan = make_plan(
            inventories,
            sources,
            num_members=len(generation.members),
            pipelines=generation.pipelines,
        )
        plan.inputs_change = inputs_change
        plan.kept_step, plan.earlier_generations = sources.kept_step, sources.earlier_generations
        if plan.control and sources.asked_storage:  # an older state, whose best model may have been replaced
            plan.control["kept_step"] = sources.kept_step
        store.set(_PLAN_BY_STORAGE if sources.asked_storage else _PLAN, plan.model_dump_json())
        return plan

    def forget_plan(self) -> None:
        """On the leader, delete the plan, which all participants have read."""
        if self.leads:
            self._forget([_PLAN, _PLAN_BY_STORAGE])

    def _forget(self, keys: Sequence[str]) -> None:
        """Delete keys that all participants have read. Otherwise they would stay as long as the leader's process lives.
        A thread does it, because each key takes a message to the store and back."""
        threading.Thread(target=_delete, args=(self.store, keys), name="forget-keys").start()

    def _compare_data(self, inventories: Sequence[Inventory]) -> None:
        """Refuse the generation if its members see different data.

        A joiner cannot end a job that trains. If only members without state differ, the workers that hold state return
        to the generation before.

        Raises:
            RegroupError: only members without state differ.
            WorkersDifferError: a member with state differs, or no participant holds state.
            SpecError: no participant holds state, and their programs built models with other weights.
        """
        generation = self.generation
        if not any(each.units for each in inventories):
            _compare_weights(inventories)
        if not (differing := differing_members(inventories, len(generation.members))):
            return
        advice = (
            "targets, or the order of samples, differ between workers. Seed all random choices in the data, and do not"
            " move the checkpoints of a running job"
        )
        if any(inventories[rank].units for rank in differing) or not any(each.units for each in inventories):
            raise WorkersDifferError(advice)
        names = ", ".join(generation.members[rank].name for rank in differing)
        why = f"{names} would train on other data than the present workers: {advice}"
        self.store.set(_PLAN, _NO_PLAN + why)
        raise RegroupError(why)

    def pass_barrier(self, work: Work[T] | None) -> T | None:
        """Do `work` in a thread and return its result. Meanwhile all participants, which all call this, wait."""
        return self.tools.barrier.pass_within(work, self.groups.participants, self.deadline)


def _compare_weights(inventories: Sequence[Inventory]) -> None:
    """Refuse programs that build other weights on each worker. A checkpoint may replace them, but not all buffers.

    Raises:
        SpecError: they differ by more than rounding.
    """
    first, *others = (each.first_sums for each in inventories)
    for other in others:
        if not all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) for a, b in zip(first, other, strict=False)):
            raise SpecError(
                "spec.model",
                "each worker built the model with other weights, but all must start from the same: build it inside of"
                " the function, where torch, numpy.random and random are seeded",
            )


def _delete(store: Store, keys: Sequence[str]) -> None:
    with contextlib.suppress(dist.DistError):  # the store is gone, and the keys with it
        for key in keys:
            store.delete_key(key)


class _LeadersSources:
    """Looks up what the leader needs for its plan. Implements `PlanSources`.

    Attributes:
        asked_storage: whether the storage was read, because the participants do not hold all units of the newest state.
        kept_step: committed steps of the best model in the storage; 0 without one, or if the storage was not read.
        earlier_generations: the highest layout generation of earlier jobs, in the storage or in the run's record.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._tools, self._generation = agreement.tools, agreement.generation
        self.asked_storage = False
        self.kept_step = self.earlier_generations = 0
        self._sizes: dict[tuple[int, int], Sequence[int]] = {}

    def cut(self, control: Control) -> Cut:
        generation, job = self._generation, self._tools.job.at(control.visit)
        costs = ModelCosts.model_validate(control.costs) if control.costs else None
        return job.layouts.cut(control.boundary, generation.stages, generation.pipelines, costs, control.cached_layers)

    def unit_bytes(self, control: Control) -> Sequence[int]:
        key = control.visit, control.boundary
        if key not in self._sizes:
            codec, shells = self._tools.at(control.visit).codec, self._tools.at(control.visit).shells
            self._sizes[key] = [codec.size(index, shell, control.boundary) for index, shell in enumerate(shells)]
        return self._sizes[key]

    def durable(self) -> DurablePoint | None:
        """Tell the other participants to wait, because the storage may be slow. Then read it."""
        self._agreement.store.set(_PLAN, "")
        self.asked_storage = True
        asked = self._agreement.pass_barrier(self._ask)
        assert asked is not None
        found, self.kept_step, self.earlier_generations = asked
        return found

    def map_of(self, control: Control) -> StateMap | None:
        return self._tools.map_of(control, self._generation.stages)

    def _ask(self) -> tuple[DurablePoint | None, int, int]:
        checkpoints = self._tools.checkpoints
        found, kept_step, generation = checkpoints.durable(), checkpoints.kept_step(), checkpoints.newest_generation()
        # The record also names generations that wrote nothing to the storage. If no generation wrote there, the record
        # is that of another run.
        return found, kept_step, max(generation, newest_generation(self._tools.run_dir)) if generation else 0


def _as_other_state(doubted: WorkerState) -> OtherState:
    control = doubted.control
    return OtherState(step=control.step, units=sorted(doubted.units), control=control.to_dict())
