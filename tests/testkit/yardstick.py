"""How much a computation takes, by a measure that is the same on a slow or busy machine."""

import time
from collections.abc import Callable


def yardsticks(work: Callable[[], object], *, times: int = 1) -> float:
    """Processor time of `work`, as a multiple of what a loop of 100,000 squares takes on this machine (5 ms or so): the
    least of so many runs."""

    def seconds(run: Callable[[], object]) -> float:
        started = time.process_time()
        run()
        return time.process_time() - started

    least = min(seconds(lambda: sum(number * number for number in range(100_000))) for _ in range(10))
    return min(seconds(work) for _ in range(times)) / least
