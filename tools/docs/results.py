"""The results of the benchmarks, and what a dotted path finds in one."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tools.devcluster.layout import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"


def found_at(
    path: Sequence[str], value: Any, place: tuple[str, ...] = (), around: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[tuple[str, ...], Any, Mapping[str, Any]]]:
    """Where a path leads: the keys that its stars stand for, the value, and everything in the objects around it."""
    if not path:
        yield place, value, around
    elif isinstance(value, dict):
        for key in value if path[0] == "*" else [path[0]] if path[0] in value else []:
            yield from found_at(path[1:], value[key], (*place, key) if path[0] == "*" else place, {**around, **value})
