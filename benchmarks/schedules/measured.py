"""What ways of running a round took, pair by pair, and the bounds of their ratios."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.overhead import lower_bound


@dataclass(frozen=True)
class Measured:
    """What each way's round took: seconds by name, one number for each pair of blocks."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratios(self, slow: str, quick: str) -> list[float]:
        """Seconds of one way over those of another, by pair."""
        return [a / b for a, b in zip(self.seconds[slow], self.seconds[quick], strict=True)]

    def low(self, slow: str, quick: str) -> float:
        """Lower 95 % bound of the median ratio."""
        return lower_bound(self.ratios(slow, quick))

    def table(self, expected: Mapping[str, float] = MappingProxyType({})) -> dict[str, dict[str, float]]:
        """Seconds of each way: the median, the extremes, and what was `expected` of it."""
        return {
            name: {"median": self.median(name), "min": min(seconds), "max": max(seconds)}
            | ({"expected": expected[name]} if name in expected else {})
            for name, seconds in self.seconds.items()
        }

    def best(self, names: Sequence[str]) -> str:
        """The way with the least median."""
        return min(names, key=self.median)


def upper_bound(values: Sequence[float]) -> float:
    """Upper 95 % bound of the median."""
    return -lower_bound([-value for value in values])
