"""Chooses which members leave for a smaller layout: claimed workers first, then those that leave whole nodes empty.

An autoscaler can remove an empty node, and a large pod fits there. Leavers that are spread over many nodes free no
whole node.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from pipetransformer_contract.messages import Member

from .members import parted
from .view import View


def stayers_first(view: View, members: Sequence[Member], staying: int) -> list[Member]:
    """Sorts the members so that the first `staying` of them stay and the others leave."""
    claimed, own = parted(members, view.claimed_names)
    going = max(0, len(members) - staying)
    left = _choose(view, claimed, min(going, len(claimed))) | _choose(view, own, max(0, going - len(claimed)))
    leave, stay = parted([*own, *claimed], left)
    return [*stay, *leave]


def _choose(view: View, members: Sequence[Member], number: int) -> set[str]:
    """Names of `number` members that leave.

    First leave members on the node that the job's share names, because a pod of another owner waits for it. Then come
    nodes that become empty, those with the fewest members first, and then nodes that other pods keep busy. On each node
    the last members leave first."""
    groups = _by_node(view, members)
    share = view.status.share
    asked = share.node if share else ""
    emptied = _emptied(view, groups)
    chosen: list[str] = [member.name for member in groups.pop(asked, ())][:number]
    for node in _smallest(groups, emptied):
        if len(groups[node]) <= number - len(chosen):
            chosen += [member.name for member in groups.pop(node)]
    for node in (*_smallest(groups, groups.keys() - emptied), *_smallest(groups, emptied)):
        chosen += [member.name for member in groups[node]][: number - len(chosen)]
    return set(chosen)


def _by_node(view: View, members: Sequence[Member]) -> dict[str, list[Member]]:
    """The members of each node, the last member first."""
    groups: dict[str, list[Member]] = defaultdict(list)
    for member in reversed(members):
        groups[view.by_name[member.name].node].append(member)
    return groups


def _emptied(view: View, groups: dict[str, list[Member]]) -> set[str]:
    """Nodes that are empty once all their members in `groups` have left."""
    there = Counter(view.wanted.placed.nodes)
    shared = set(view.wanted.that(lambda worker: worker.shares_node).nodes)
    candidates = groups.keys() - shared - {""}
    return {node for node in candidates if len(groups[node]) >= there[node]}


def _smallest(groups: dict[str, list[Member]], nodes: Collection[str]) -> list[str]:
    return sorted((node for node in groups if node in nodes), key=lambda node: (len(groups[node]), node))
