"""Keeps the order of jobs that wait for their first workers: which jobs give way to which, and since when.

An operator that restarts forgets the order, and decides it again with its first look.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pipetransformer_operator.plan import Gang, prefer


@dataclass(frozen=True, slots=True)
class Place:
    """A job's place among those that wait.

    Attributes:
        gives_way_to: key of the job that this one gives way to; empty: none.
        preferred_since: since when other jobs give way to this one; None: none does.
    """

    gives_way_to: str = ""
    preferred_since: datetime | None = None


#: The place of a job that neither gives way nor is preferred.
FREE = Place()


class Gangs:
    """Remembers which starting jobs are preferred, and since when."""

    def __init__(self) -> None:
        self._preferred: dict[str, datetime] = {}

    def look(self, gangs: Sequence[Gang], now: datetime) -> dict[str, Place]:
        """Returns the place of each job that gives way or is preferred, by its key."""
        there = {gang.key for gang in gangs if gang.keeps_preference}
        before = {key: since for key, since in self._preferred.items() if key in there}
        giving = prefer(gangs, before)
        self._preferred = {key: before.get(key, now) for key in {*before, *giving.values()}}
        places = {key: Place(gives_way_to=to) for key, to in giving.items()}
        places |= {key: Place(preferred_since=since) for key, since in self._preferred.items()}
        return places
