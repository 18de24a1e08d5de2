"""Clocks and random texts as arguments, so that tests set the time and repeat a run."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

#: The present time, with its time zone.
Clock = Callable[[], datetime]
#: Seconds that only grow, such as `time.monotonic`.
Stopwatch = Callable[[], float]
#: A random text of twice as many hexadecimal digits as the number given, such as `secrets.token_hex`.
Token = Callable[[int], str]


def utc_now() -> datetime:
    """The present time in UTC."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of time and chance. Two operators with equal sources and equal clusters do the same.

    Attributes:
        now: the present time, with its time zone.
        seconds: seconds that only grow.
        token: makes random texts.
    """

    now: Clock = utc_now
    seconds: Stopwatch = time.monotonic
    token: Token = secrets.token_hex

    def epoch(self) -> float:
        """Seconds since the epoch."""
        return self.now().timestamp()


#: The sources of a real run: the machine's clocks and its random generator.
MACHINE = Sources()
