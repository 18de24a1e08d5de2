"""Generations without an operator: made by the leader of a fixed world, or handed to a process by its agent."""

import datetime
import json
import logging
import logging.handlers
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from pipetransformer import Checkpoint, Training
from pipetransformer.data import EpochOrder
from pipetransformer.elastic.generations.rendezvous import (
    GenerationRendezvousHandler,
    GenerationSource,
    host_store,
)
from pipetransformer.elastic.generations.standalone_world import Chooser, Follower, World, worker_name
from pipetransformer.elastic.transport.groups import TCPStore
from pipetransformer.errors import SpecError
from pipetransformer.worker.torchrun_agent import GENERATION, OneGeneration
from pipetransformer_contract.choose import Bounds, Packing
from pipetransformer_contract.layout import Layout
from pipetransformer_contract.messages import Generation, Member, Offer, Outcome, Report, ResizeReason, StepTime
from tests.testkit.trainer.ranks import run_ranks
from tests.testkit.trainer.script import run
from tests.testkit.trainer.torchrun import set_rank

pytestmark = pytest.mark.timeout(120)

ADDRESSES = [f"127.0.0.1:{rank}" for rank in range(4)]


def make_chooser(
    initial: Layout, *, first: int = 1, clock: Callable[[], float] = time.monotonic
) -> tuple[Chooser, list[Follower]]:
    store, bounds = HashStore(), Bounds(initial, 1, 4, 1, 4, 100)
    chooser = Chooser(World(store, 0, ADDRESSES), bounds, Packing.PAPER, first=first, run_uid="fixed-1", clock=clock)
    return chooser, [Follower(World(store, rank, ADDRESSES)) for rank in range(1, 4)]


def report(generation: int, **changes: Any) -> Report:
    """Half of the stages fit where two did at the start."""
    offers = [Offer(stages=2, bytes_per_worker=60), Offer(stages=1, bytes_per_worker=90)]
    fields: dict[str, Any] = {"step": 5, "boundary": 2, "num_layers": 4, "bytes_budget": 100, "offers": offers}
    return Report(job_uid="fixed-world", layout_generation=generation, **fields | changes)


def shape(generation: Generation) -> tuple[int, int, int]:
    return generation.layout_generation, generation.stages, generation.pipelines


def test_every_rank_gets_the_layout_that_the_leader_chooses() -> None:
    chooser, followers = make_chooser(Layout(2, 2))
    sources: list[GenerationSource] = [chooser, *followers]
    assert [shape(source.next_generation(0)) for source in sources] == [(1, 2, 2)] * 4

    chooser.submit(report(1), urgent=True)

    waits = [chooser.watch, *(follower.next_generation for follower in followers)]
    assert [shape(wait(1)) for wait in waits] == [(2, 1, 4)] * 4


def test_a_rank_with_other_arguments_than_rank_0_is_refused() -> None:
    store, same = HashStore(), {"spec.training.seed": 3, "spec.pipeline.stages": 2}
    for rank in (0, 1):
        World(store, rank, ADDRESSES).compare(same)

    with pytest.raises(SpecError, match=r"spec\.training\.seed: is 4 on rank 2, but 3 on rank 0: all ranks need the"):
        World(store, 2, ADDRESSES).compare({**same, "spec.training.seed": 4})


def test_reports_of_another_generation_change_nothing() -> None:
    chooser, _ = make_chooser(Layout(2, 2), first=7)

    chooser.submit(report(6), urgent=True)

    assert chooser.newest() == 7


def test_a_rank_that_is_left_over_waits_for_a_layout_that_names_it() -> None:
    chooser, followers = make_chooser(Layout(2, 1))
    found: list[Generation] = []
    thread = threading.Thread(target=lambda: found.append(followers[2].next_generation(0)))
    thread.start()

    chooser.submit(report(1), urgent=True)
    thread.join(20)

    assert shape(found[0]) == (2, 1, 4)


def test_a_leader_that_lost_its_group_meets_the_same_layout_again() -> None:
    chooser, followers = make_chooser(Layout(2, 2))

    again = chooser.next_generation(1)

    assert shape(again) == (2, 2, 2) and again.reason is ResizeReason.FAILURE
    assert followers[0].next_generation(1) == again


def make_handler(source: Follower) -> GenerationRendezvousHandler:
    """Of a rank that only looks for generations, and meets nobody."""
    own_store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = worker_name(source._world.rank)
    return GenerationRendezvousHandler(rank, own_store, source, timeout=datetime.timedelta(seconds=20))


def go_back(chooser: Chooser, failed: int) -> threading.Thread:
    """The leader came to the generation `failed`, which was not committed, and looks for another one."""
    looking = threading.Thread(target=chooser.watch, args=(failed,))
    looking.start()
    deadline = time.monotonic() + 20
    while chooser._tried < failed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return looking


def test_a_layout_that_was_not_committed_is_chosen_again_ever_later() -> None:
    now = 0.0
    chooser, followers = make_chooser(Layout(2, 2), clock=lambda: now)
    chooser.submit(report(1), urgent=True)
    chooser.submit(report(1), urgent=True)  # on the way to the second
    assert chooser.newest() == 2

    for failed, pause in enumerate((60, 120, 240, 480, 960, 1920, 3600, 3600), start=2):
        looking = go_back(chooser, failed)
        chooser.submit(report(1), urgent=True)
        now += pause - 1
        chooser.submit(report(1), urgent=True)
        assert chooser.newest() == failed
        now += 1
        chooser.submit(report(1), urgent=True)
        assert shape(followers[0].next_generation(failed)) == (failed + 1, 1, 4)
        looking.join(20)


def test_workers_that_may_hold_state_meet_again_after_a_failed_generation() -> None:
    chooser, _ = make_chooser(Layout(4, 1))
    chooser.submit(report(1, offers=[Offer(stages=3, bytes_per_worker=60)]), urgent=True)
    smaller = chooser.next_generation(1)
    assert [member.name for member in smaller.leavers] == ["rank-3"]

    again = chooser.next_generation(2)

    assert (again.members, again.leavers) == (smaller.members, smaller.leavers)


def test_a_rank_that_stood_still_takes_the_newest_generation() -> None:
    chooser, followers = make_chooser(Layout(2, 2))
    handler = make_handler(followers[0])
    handler.find_next()
    for given_up in (1, 2, 3):
        chooser.next_generation(given_up)

    assert handler.is_superseded() and handler.find_next().layout_generation == 4

    chooser.next_generation(4)
    assert handler.is_superseded()


def test_a_rank_no_longer_named_joins_no_generation_that_was_given_up() -> None:
    chooser, followers = make_chooser(Layout(2, 1))
    chooser._publish(Layout(1, 4), 2, ResizeReason.PACK)
    for number in (3, 4):
        chooser._publish(Layout(2, 1), number, ResizeReason.FAILURE)
    found: list[Generation] = []
    thread = threading.Thread(target=lambda: found.append(followers[2].next_generation(0)))
    thread.start()

    chooser._publish(Layout(1, 4), 5, ResizeReason.PACK)
    thread.join(20)

    assert shape(found[0]) == (5, 1, 4)


def test_the_end_of_the_run_makes_the_newest_generation_void() -> None:
    chooser, followers = make_chooser(Layout(2, 1))
    chooser.submit(report(1), urgent=True)
    handler = make_handler(followers[2])
    handler.find_next()
    assert not handler.is_superseded()

    chooser.submit(report(1, outcome=Outcome.SUCCEEDED), urgent=True)

    assert handler.is_superseded()
    with pytest.raises(RendezvousClosedError):
        handler.find_next()


@pytest.mark.parametrize(("total_steps", "newest"), [(5, 1), (6, 1), (7, 2)])
def test_no_layout_is_chosen_that_would_train_no_step(total_steps: int, newest: int) -> None:
    chooser, _ = make_chooser(Layout(2, 1))

    chooser.submit(report(1, total_steps=total_steps), urgent=True)

    assert chooser.newest() == newest


def test_uneven_stages_are_cut_anew_in_the_same_layout() -> None:
    chooser, _ = make_chooser(Layout(2, 2))
    times = [StepTime(pipelines=2, seconds=0.8)]
    offers = [Offer(stages=2, bytes_per_worker=60, step_seconds=times), Offer(stages=1, bytes_per_worker=110)]

    chooser.submit(report(1, offers=offers, step_seconds=1.0, total_steps=100), urgent=True)

    again = chooser.next_generation(1)
    assert shape(again) == (2, 2, 2) and again.reason is ResizeReason.BALANCE


def test_a_rank_that_is_left_over_waits_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    follower = Follower(World(TCPStore("127.0.0.1", store.port), 1, ADDRESSES))
    threading.Timer(1.2, follower.close).start()  # longer than it had been silent

    with pytest.raises(RendezvousClosedError):
        follower.next_generation(0)

    assert "[c10d]" not in capfd.readouterr().err  # as torch's warnings begin; threads of other tests may write, too


def test_a_rank_that_waits_for_a_leader_that_has_gone_ends() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    follower = Follower(World(TCPStore("127.0.0.1", store.port), 1, ADDRESSES))
    del store

    with pytest.raises(RendezvousClosedError, match="rank 0 has gone"):
        follower.next_generation(0)


def test_the_end_of_the_run_releases_who_waits() -> None:
    chooser, followers = make_chooser(Layout(2, 1))

    chooser.submit(report(1, outcome=Outcome.SUCCEEDED), urgent=True)

    with pytest.raises(RendezvousClosedError):
        followers[2].next_generation(0)


def test_a_leader_that_ends_before_it_leads_releases_who_waits() -> None:
    chooser, followers = make_chooser(Layout(2, 1))

    chooser.close()

    with pytest.raises(RendezvousClosedError, match="the run has ended"):
        followers[2].next_generation(0)


def test_a_rank_without_a_part_in_the_last_layout_learns_how_the_run_ended() -> None:
    store = HashStore()
    leader, follower = (World(store, rank, ADDRESSES[:2]) for rank in range(2))
    leader.tell_end({"ending": "Finished", "control": {"step": 60}})

    assert follower.end() == {"ending": "Finished", "control": {"step": 60}}
    follower.leave()
    leader.leave()


def test_a_process_under_an_agent_lives_for_one_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OneGeneration.from_environment() is None
    published = make_chooser(Layout(2, 2), first=3)[0].next_generation(0)
    monkeypatch.setenv(GENERATION, published.model_dump_json(by_alias=True))

    source = OneGeneration.from_environment()

    assert source is not None
    found = source.next_generation(0)
    assert shape(found) == (3, 2, 2) and found.nonce != published.nonce
    source.close()
    with pytest.raises(RendezvousClosedError):
        source.next_generation(3)


def test_processes_do_not_wait_for_a_leaver_whose_agent_starts_none() -> None:
    store, address = host_store("127.0.0.1", datetime.timedelta(seconds=20))
    stays, leaves = (Member(name=name, uid=name, address=address) for name in ("a", "b"))
    published = Generation(
        job_uid="uid", layout_generation=2, stages=1, pipelines=1, members=[stays], leavers=[leaves], leader="a",
        nonce="n", reason=ResizeReason.RELEASE,
    )  # fmt: skip
    soon = datetime.timedelta(seconds=1)

    process = GenerationRendezvousHandler("a", store, OneGeneration(published), timeout=soon)

    assert process.next_rendezvous().world_size == 1


def train_twice(group: dist.ProcessGroup, port: int, folder: str) -> list[int]:
    from pipetransformer import Training, train
    from tests.testkit.trainer.script import NO_FREEZE, model, samples

    set_rank(group, port)
    return [
        train(
            model=model,
            data=(samples(64, 0), samples(20, 1)),
            training=Training(steps=steps, global_batch_size=16),
            freeze=NO_FREEZE,
            run_dir=f"{folder}/{steps}",
        ).steps
        for steps in (2, 3)
    ]


def test_a_script_may_train_twice(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    assert run_ranks(2, train_twice, store.port, str(tmp_path)) == [[2, 3], [2, 3]]


def train_by_own_schedule(group: dist.ProcessGroup, port: int, folder: str) -> list[int]:
    """Twice, by 1F1B and by a schedule of the script's own. Returns the micro-batches of each round that it was asked
    for."""
    from pipetransformer import Pipeline, Training, train
    from pipetransformer.schedules import Action, GPipe, RoundShape
    from tests.testkit.trainer.script import NO_FREEZE, model, samples

    counted: list[int] = []

    class Own:
        def actions(self, shape: RoundShape) -> list[list[Action]]:
            counted.append(shape.chunks)
            return GPipe().actions(shape)

    set_rank(group, port)
    for schedule in (None, Own()):
        train(
            model=model,
            data=(samples(64, 0), samples(20, 1)),
            training=Training(steps=3, global_batch_size=16, precision="Float64"),
            freeze=NO_FREEZE,
            pipeline=Pipeline(stages=2, micro_batch_size=4),
            schedule=schedule,
            run_dir=f"{folder}/{'own' if schedule else 'stock'}",
        )
    return counted


def test_a_script_may_bring_its_own_schedule(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    asked = run_ranks(2, train_by_own_schedule, store.port, str(tmp_path))
    assert [set(rounds) for rounds in asked] == [{4}, {4}], "predictions ask, too"

    stock, own = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "steps.jsonl").read_text().splitlines()]
        for name in ("stock", "own")
    )
    assert len(own) == 3 and own == pytest.approx(stock, rel=1e-9)


def go_on(group: dist.ProcessGroup, port: int, folder: str) -> tuple[list[tuple[int, ...]], list[str]]:
    """Two more steps from the checkpoint there: shapes of all generations as this rank was told, and its warnings."""
    from pipetransformer import Checkpoint, Pipeline, Training
    from tests.testkit.trainer.script import Log, run

    set_rank(group, port)
    log, said = Log(), logging.handlers.BufferingHandler(100)
    logging.getLogger("pipetransformer.library.standalone").addHandler(said)
    run(
        Path(folder),
        checkpoint=Checkpoint(location=f"{folder}/checkpoint", every_steps=2),
        training=Training(steps=4, global_batch_size=16),
        pipeline=Pipeline(stages=1),
        callbacks=[log],
    )
    return [tuple(told[2:]) for told in log.of("generation")], [record.getMessage() for record in said.buffer]


@pytest.mark.parametrize(
    ("num_shards", "pipelines", "warning"),
    [
        (16, 2, []),
        (1, 1, ["1 of 2 processes are idle in the first layout: the data of the checkpoint step-000000000002-g1"]),
    ],
    ids=["", "of an older release"],
)
def test_a_resumed_run_has_no_more_pipelines_than_its_data_have_shards(
    num_shards: int, pipelines: int, warning: list[str], tmp_path: Path
) -> None:
    checkpoint = Checkpoint(location=str(tmp_path / "checkpoint"), every_steps=2)
    run(tmp_path, checkpoint=checkpoint, training=Training(steps=2, global_batch_size=16))
    [marker] = (tmp_path / "checkpoint").glob("step-000000000002-g1-*/DONE.json")
    written = json.loads(marker.read_text())
    assert written["numShards"] == written["run"]["numShards"] == 16
    changed = {"numShards": num_shards, "run": written["run"] | {"numShards": num_shards}}
    marker.write_text(json.dumps(written | changed))

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (shapes, said), _ = run_ranks(2, go_on, store.port, str(tmp_path))

    assert shapes == [(1, pipelines)]
    assert [re.sub(r"-\w+ allow no more pipelines", "", message) for message in said] == warning
    order = EpochOrder(seed=0, num_samples=64, global_batch=16, num_shards=num_shards)
    trained: dict[int, set[int]] = defaultdict(set)
    for path in (tmp_path / "run" / "ledger").iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            trained[line["step"]] |= set(line["samples"])
    assert all(trained[step] == {i for shard in order.batch(step) for i in shard} for step in (2, 3))
