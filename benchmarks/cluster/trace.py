"""Jobs drawn from the figures of Philly's trace: sizes, durations and arrivals."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_TABLE = json.loads(Path(__file__).with_name("philly.json").read_text())
#: Longer jobs count as this long: three days.
LONGEST_SECONDS = 3 * 86_400
#: Smaller jobs are rigid.
SMALLEST_ELASTIC = 4
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Job:
    """One job.

    Attributes:
        number: place in the order of arrivals.
        arrival: seconds since the simulation began.
        gpus: GPUs that its user asks for.
        seconds: how long it trains on them with nothing frozen.
        freezes: whether its layers freeze.
    """

    number: int
    arrival: float
    gpus: int
    seconds: float
    freezes: bool

    @property
    def key(self) -> str:
        """A name that sorts like the arrivals."""
        return f"default/job-{self.number:06d}"

    @property
    def elastic(self) -> bool:
        """Whether it may train in several layouts."""
        return self.gpus >= SMALLEST_ELASTIC


def draw(
    count: int,
    gpus: int,
    *,
    load: float,
    share_freezing: float,
    seed: int,
    daily: bool = False,
    share_elastic: float | None = None,
) -> Sequence[Job]:
    """Draws jobs that ask for `load` times what the cluster has, over the time in which they arrive.

    A seed gives the same jobs at each load and share. At a larger share the same jobs freeze, and others.

    Args:
        count: number of jobs.
        gpus: GPUs of the cluster.
        load: GPU-seconds that the jobs need with nothing frozen, over those that pass while they arrive.
        share_freezing: share of the elastic jobs whose layers freeze.
        seed: of all draws.
        daily: whether arrivals follow Philly's hours of the day; otherwise they are a Poisson process.
        share_elastic: share of the jobs that are elastic, for tests; by default Philly's.
    """
    sizes, gaps, fates = (random.Random(f"{seed} {what}") for what in ("jobs", "arrivals", "fates"))
    weights = _weights(share_elastic)
    asked = [_one(sizes, weights) for _ in range(count)]
    span = sum(size * seconds for size, seconds in asked) / (load * gpus)
    arrivals = _arrivals(count, span, gaps, daily=daily)
    return [
        Job(number, arrival, size, seconds, freezes=size >= SMALLEST_ELASTIC and fates.random() < share_freezing)
        for number, ((size, seconds), arrival) in enumerate(zip(asked, arrivals, strict=True))
    ]


def _weights(share_elastic: float | None) -> Sequence[float]:
    """How often each size is drawn."""
    shares = {size["gpus"]: size["share_of_jobs"] for size in _TABLE["sizes"]}
    if share_elastic is None:
        return list(shares.values())
    elastic = sum(share for gpus, share in shares.items() if gpus >= SMALLEST_ELASTIC)
    rigid = sum(shares.values()) - elastic
    return [
        share * (share_elastic / elastic if gpus >= SMALLEST_ELASTIC else (1 - share_elastic) / rigid)
        for gpus, share in shares.items()
    ]


def _one(draws: random.Random, weights: Sequence[float]) -> tuple[int, float]:
    """GPUs and seconds of a job: log-normal within its size, no shorter than the fit covers."""
    size = draws.choices(_TABLE["sizes"], weights=weights)[0]
    while (seconds := draws.lognormvariate(size["log_mean"], size["log_deviation"])) < _TABLE["shortest_seconds"]:
        pass
    return size["gpus"], min(seconds, LONGEST_SECONDS)


def _arrivals(count: int, span: float, draws: random.Random, *, daily: bool) -> Iterator[float]:
    """Ascending times in seconds, of which the last is `span`."""
    operational, total = [], 0.0
    for _ in range(count):
        total += draws.expovariate(1.0)
        operational.append(total)
    for time in operational:
        even = span * time / total
        yield _clock_time(even) if daily else even


def _clock_time(even: float) -> float:
    """The time by which as many jobs have arrived as by `even` with a constant rate.

    The rate swings around 1 once a day. The ratio of its extremes is that of Philly's hours."""
    low, high = _TABLE["arrivals"]["quietest_hour"], _TABLE["arrivals"]["busiest_hour"]
    swing, turn = (high - low) / (high + low), 2 * math.pi / _DAY
    time = even
    for _ in range(60):  # a contraction, because the swing is below 1
        time = even - swing / turn * (1 - math.cos(turn * time))
    return time
