"""The benchmark of the cache says that hits are as expected only if the cache was read."""

import json

from benchmarks.cache import LEAST_HITS, least_hit_rate
from tests.testkit.results import RESULTS


def test_a_cache_that_is_never_read_has_no_hits() -> None:
    filling = {"epoch": 1, "pipelines": 1, "hit_rate": 0.0}
    assert least_hit_rate([filling]) == 0
    assert least_hit_rate([filling, {"epoch": 2, "pipelines": 1, "hit_rate": 0.0}]) == 0
    assert min(LEAST_HITS.values()) > 0


def test_the_least_hit_rate_counts_once_the_cache_is_filled() -> None:
    hits = [{"epoch": epoch, "pipelines": 1, "hit_rate": rate} for epoch, rate in ((1, 0.0), (2, 1.0), (3, 0.9))]
    assert least_hit_rate(hits) == 0.9


def test_the_recorded_jobs_had_the_hits_that_they_are_said_to_have() -> None:
    recorded = json.loads((RESULTS / "cache.json").read_text())
    assert recorded["jobs"].keys() == LEAST_HITS.keys()
    for name, job in recorded["jobs"].items():
        assert least_hit_rate(job["hits"]) >= LEAST_HITS[name]
