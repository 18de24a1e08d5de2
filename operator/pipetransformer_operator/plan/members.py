"""Selects members of generations by their names."""

from collections.abc import Container, Iterable

from pipetransformer_contract.messages import Member


def names(members: Iterable[Member]) -> frozenset[str]:
    """Names of the members."""
    return frozenset(member.name for member in members)


def parted(members: Iterable[Member], chosen: Container[str]) -> tuple[list[Member], list[Member]]:
    """Two lists: the members whose names are in `chosen`, and the others. Both keep the order."""
    parts: tuple[list[Member], list[Member]] = [], []
    for member in members:
        parts[member.name not in chosen].append(member)
    return parts
