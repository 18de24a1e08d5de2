"""The soak's second count of accelerators finds a status that is wrong by more than it had time to see."""

from datetime import UTC, datetime

from tests.soak.accounts import Account
from tests.soak.watch import Object

START = 1_800_000_000.0


def pod(name: str) -> Object:
    return {"metadata": {"uid": name}}


def status(time: float, held: int, saved: int, seconds: float, *, stages: int = 2) -> Object:
    return {
        "initialWorkers": 4,
        "generation": {"stages": stages},
        "gpus": {"held": held, "saved": saved},
        "gpuSecondsSaved": seconds,
        "gpuSecondsTime": datetime.fromtimestamp(START + time, UTC).isoformat(),
    }


def released(*, seen_at: float, said: float) -> Account:
    """Four workers become two at 10 s, which the status says at `seen_at`; the job ends at 60 s."""
    account = Account("digits", stages=4)
    for name in "abcd":
        account.pod("ADDED", pod(name), 0)
    account.status(status(0, 4, 0, 0, stages=4), 0)
    account.status(status(9, 4, 0, 0), 9)
    for name in "cd":
        account.pod("DELETED", pod(name), 10)
    account.status(status(seen_at, 2, 2, 0), seen_at)
    account.status({**status(60, 0, 0, said), "completionTime": "now"}, 60)
    account.pod("DELETED", pod("a"), 70)
    return account


def test_a_status_that_says_what_the_pods_say_has_no_problem() -> None:
    account = released(seen_at=10, said=100)
    assert (account.saved, account.held, account.said_held) == (100, 140, 140)
    assert not account.check([])


def test_a_release_that_is_seen_late_is_a_problem_unless_the_operator_was_away() -> None:
    account = released(seen_at=40, said=40)
    late = account.check([])
    assert len(late) == 2
    assert "40.0 s saved, 100.0 s by its pods; 12.0 s may be missed" in late[0]
    assert "200.0 s held, 140.0 s by its pods" in late[1]
    assert not account.check([(5, 40)])
    assert not account.check([(10.5, 40)]), "it had no time to say so before"
    assert account.check([(12, 40)]), "nothing changed while it was away"
    whole = account.allowed([(5, 40)])
    assert account.allowed([(9, 40), (5, 10)]) == account.allowed([(5, 20), (20, 40), (6, 9)]) == whole


def test_a_status_that_contradicts_its_own_figures_is_a_problem() -> None:
    assert "105 s saved, 100.0 by its own figures" in released(seen_at=10, said=105).check([])[0]


def test_the_pods_of_a_start_may_be_counted_later_than_those_of_a_job_that_trains() -> None:
    def started(seen_at: float) -> list[str]:
        account = Account("digits", stages=4)
        for name in "abcd":
            account.pod("ADDED", pod(name), 0)
        account.status({"gpus": {"held": 4}}, seen_at)
        account.status({"gpus": {"held": 4}, "completionTime": "now"}, 60)
        return account.check([])

    assert not started(2.2)
    assert started(2.5) == ["digits: 230.0 s held, 240.0 s by its pods; 9.0 s may be missed"]
