"""Members of generations, by their names."""

from collections.abc import Container, Iterable

from pipetransformer_contract.messages import Member


def names(members: Iterable[Member]) -> frozenset[str]:
    """Names of the members."""
    return frozenset(member.name for member in members)


def parted(members: Iterable[Member], chosen: Container[str]) -> tuple[list[Member], list[Member]]:
    """The members whose names are chosen, and the others; each in their order."""
    parts: tuple[list[Member], list[Member]] = [], []
    for member in members:
        parts[member.name not in chosen].append(member)
    return parts
