"""When accelerators were last released, by whom, and which jobs may want to know."""

from datetime import datetime

from .ports import JobKey


class Releases:
    """Remembers the newest release, and the newest by anybody else: a job does not wake because of its own pods."""

    def __init__(self) -> None:
        self._newest: tuple[datetime, JobKey | None] | None = None
        self._other: datetime | None = None

    def note(self, time: datetime, by: JobKey | None) -> None:
        """Accelerators were released by the job's pods; None: by anything else, such as a node that appeared."""
        if self._newest is not None and self._newest[1] != by:
            self._other = self._newest[0]
        self._newest = time, by

    def for_job(self, key: JobKey) -> datetime | None:
        """When anything but the job itself last released accelerators; None: not yet."""
        if self._newest is None or self._newest[1] != key:
            return self._newest[0] if self._newest else None
        return self._other
