"""When accelerators were last released, as each job sees it."""

from datetime import datetime

from .ports import JobKey


class Releases:
    """Remembers the newest release, and the newest by another job, because a job ignores what its pods released."""

    def __init__(self) -> None:
        self._newest: datetime | None = None
        self._by: JobKey | None = None
        self._before: datetime | None = None  # the newest one that is not by `_by`

    def note(self, time: datetime, by: JobKey | None) -> None:
        """Pods of the job released accelerators; None: a pod of another owner did, or a node appeared."""
        if by != self._by:
            self._before = self._newest
        self._newest, self._by = time, by

    def for_job(self, key: JobKey) -> datetime | None:
        """When another job, another owner's pod or a new node last released accelerators; None: not yet."""
        return self._before if self._by == key else self._newest
