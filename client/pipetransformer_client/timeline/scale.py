"""Scales of a chart: the position of a value, the values that get a tick, and short numbers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

_MINUTE, _HOUR = 60.0, 3600.0


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` onto pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The position of a value in pixels. A value outside the scale is placed at its edge."""
        share = (value - self.low) / ((self.high - self.low) or 1)
        return self.start + min(max(share, 0), 1) * (self.end - self.start)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values between `low` and `high` for the ticks of an axis, at most `count + 1`."""
    step = _step((high - low) / max(count, 1))
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def rounded(low: float, high: float) -> tuple[float, float]:
    """Round numbers just below `low` and just above `high`. They differ even if `low` equals `high`."""
    step = _step((high - low) / 4)
    return math.floor(low / step) * step, max(math.ceil(high / step), math.floor(low / step) + 1) * step


def _step(least: float) -> float:
    """The smallest number that is at least `least` and is 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(least)) if least > 0 else 1e-3
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * least)


def time_ticks(seconds: float, count: int) -> Iterator[tuple[float, str]]:
    """Ticks in seconds with their labels in seconds, minutes or hours. The last label names the unit."""
    unit, name = next(
        (unit, name) for unit, name in ((_HOUR, "h"), (_MINUTE, "min"), (1.0, "s")) if seconds >= 5 * unit or unit == 1
    )
    found = ticks(0, seconds / unit, count)
    for number, value in enumerate(found):
        yield value * unit, f"{value:g} {name}" if number == len(found) - 1 else f"{value:g}"


def short(value: float) -> str:
    """A number with at most three digits, and k or M for thousands or millions."""
    for size, name in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{name}"
    return f"{value:.3g}"
