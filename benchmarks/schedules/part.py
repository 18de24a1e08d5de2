"""What each part of bench-schedules gives back."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Found:
    """Figures of a part.

    Attributes:
        figures: by their keys in the result.
        ways: seconds of each round that was run, by case and name: measured, and simulated where that was asked.
        errors: simulated against measured seconds, as a share, by list, of lists whose actions take 10 ms or more.
    """

    figures: Mapping[str, float]
    ways: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
