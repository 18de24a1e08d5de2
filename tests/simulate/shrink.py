"""Makes a failing life small: drops faults and jobs as long as the same rule is broken, and prints it as a test."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from .scenario import Scenario

#: A smaller life has other interleavings: so many are tried before a part counts as needed.
TRIES = 4


def shrink(scenario: Scenario, broken: Callable[[Scenario], set[str]]) -> Scenario:
    """The smallest life that was found in which one of the same rules is broken.

    Args:
        scenario: in which something is broken.
        broken: the rules that are broken in a life.
    """
    rules = broken(scenario)
    while (smaller := _smaller(scenario, rules, broken)) is not None:
        scenario = smaller
    return scenario


def _smaller(scenario: Scenario, rules: set[str], broken: Callable[[Scenario], set[str]]) -> Scenario | None:
    for candidate in _candidates(scenario):
        for again in range(TRIES):
            tried = replace(candidate, again=again)
            if broken(tried) & rules:
                return tried
    return None


def _candidates(scenario: Scenario) -> Iterator[Scenario]:
    """The life without one of its parts."""
    if len(scenario.jobs) > 1:
        yield from (scenario.without(job=job.name) for job in scenario.jobs)
    yield from (scenario.without(fault=fault) for fault in scenario.faults)
    if scenario.operators > 1:
        yield replace(scenario, operators=1)


def as_test(scenario: Scenario) -> str:
    """Lines to paste into a file under tests/unit."""
    return (
        "from tests.simulate.life import live\n"
        "from tests.simulate.scenario import Fault, JobPlan, Scenario\n\n\n"
        f"def test_life_{scenario.seed}_breaks_no_rule() -> None:\n"
        f"    assert live({scenario!r}).violations == []\n"
    )
