"""When accelerators were last released, as each job sees it."""

from datetime import datetime

from .ports import JobKey


class Releases:
    """Remembers the newest release, and the newest by another job, because a job ignores what its pods released."""

    def __init__(self) -> None:
        self._newest: tuple[datetime, JobKey | None] | None = None
        self._other: datetime | None = None

    def note(self, time: datetime, by: JobKey | None) -> None:
        """Pods of the job released accelerators; None: a pod of another owner did, or a node appeared."""
        if self._newest is not None and self._newest[1] != by:
            self._other = self._newest[0]
        self._newest = time, by

    def for_job(self, key: JobKey) -> datetime | None:
        """When another job, another owner's pod or a new node last released accelerators; None: not yet."""
        if self._newest is None or self._newest[1] != key:
            return self._newest[0] if self._newest else None
        return self._other
