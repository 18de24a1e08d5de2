"""Keeps the order among jobs that wait for their first workers: which of them others give way to, and since when.

What it remembers is lost with the operator, and decided again at its first look.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pipetransformer_operator.plan import Gang, prefer


@dataclass(frozen=True, slots=True)
class Turn:
    """A job's place among those that wait.

    Attributes:
        gives_way_to: the job that it gives way to; empty without one.
        preferred_since: since when others give way to this one; None: none does.
    """

    gives_way_to: str = ""
    preferred_since: datetime | None = None


#: Of a job that neither gives way nor is preferred.
FREE = Turn()


class Gangs:
    """See the module."""

    def __init__(self) -> None:
        self._preferred: dict[str, datetime] = {}

    def look(self, gangs: Sequence[Gang], now: datetime) -> dict[str, Turn]:
        """The place of each job that gives way or is preferred, by its key."""
        there = {gang.key for gang in gangs if gang.eligible or gang.fresh}
        before = {key: since for key, since in self._preferred.items() if key in there}
        giving = prefer(gangs, before)
        self._preferred = {key: before.get(key, now) for key in {*before, *giving.values()}}
        turns = {key: Turn(gives_way_to=to) for key, to in giving.items()}
        turns |= {key: Turn(preferred_since=since) for key, since in self._preferred.items()}
        return turns
