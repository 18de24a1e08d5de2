"""The time of one turn, and when the next turn is due."""

from datetime import datetime


class TurnClock:
    """The time of one turn. It stands still during the turn, and notes when the next turn is due.

    Attributes:
        now: the time of this turn.
        next_turn: the earliest time that a rule waits for; None if no rule waits for a time.
    """

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.next_turn: datetime | None = None

    def wake_at(self, time: datetime) -> None:
        """Asks for another turn at `time`, even if nothing happens."""
        self.next_turn = time if self.next_turn is None else min(self.next_turn, time)

    def reached(self, time: datetime) -> bool:
        """Whether `time` has come. If not, asks for another turn at that time."""
        if self.now < time:
            self.wake_at(time)
        return self.now >= time

    def is_ahead(self, time: datetime | None) -> bool:
        """Whether `time` is not None and lies in the future."""
        return time is not None and self.now < time

    def awaits(self, time: datetime | None) -> bool:
        """Like `is_ahead`, and asks for another turn at `time`."""
        return time is not None and not self.reached(time)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next turn; None if no rule waits for a time."""
        return None if self.next_turn is None else max(0.1, (self.next_turn - self.now).total_seconds())
