"""What happened in a life, as one hash. Two lives are the same if they have the same requests in the same order."""

from collections.abc import Callable
from hashlib import blake2b


class Trace:
    """See the module.

    Args:
        time: virtual seconds.

    Attributes:
        lines: everything that was noted, in order.
    """

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._hash = blake2b(digest_size=8)
        self.lines: list[str] = []

    def note(self, *what: object) -> None:
        """Something happened."""
        line = f"{self._time():.6f} {' '.join(map(str, what))}"
        self.lines.append(line)
        self._hash.update(line.encode())

    @property
    def digest(self) -> str:
        """Of all that was noted."""
        return self._hash.hexdigest()
