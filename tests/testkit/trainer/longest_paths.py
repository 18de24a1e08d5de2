"""Another simulator of rounds, which shares nothing with ours but the types: the longest path, by relaxation."""

from collections.abc import Sequence

from pipetransformer.schedules import Action, ActionKind, MessageKind, Operation, RoundCosts, RoundShape, Value

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741


def longest_paths(
    lists: Sequence[Sequence[Operation]], shape: RoundShape, costs: RoundCosts
) -> dict[Action | Value, float]:
    """The end of each computation and message: the longest path, by relaxing every edge until nothing moves."""
    link = costs.message_seconds[0]
    takes: dict[Action | Value, float] = {}
    edges: list[tuple[Action | Value, Action | Value, float]] = []
    for actions in lists:
        before: Action | None = None
        last: dict[int, Value] = {}  # the newest message with each peer
        for one in actions:
            node = one if isinstance(one, Action) else one.value
            takes[node] = link
            if before is not None:
                edges.append((before, node, 0.0))
            if isinstance(one, Action):
                takes[one] = costs.seconds[one.kind, one.span][0] + costs.action_seconds
                before = one
            else:
                if one.peer in last:
                    edges.append((last[one.peer], one.value, 0.0))
                last[one.peer] = one.value
    for node in [one for one in takes if isinstance(one, Action) and one.kind is not W]:
        forward = node.kind is F
        of = node.span - 1 if forward else node.span + 1
        message = Value(MessageKind.ACTIVATION if forward else MessageKind.GRADIENT, node.span, node.chunk)
        if message in takes:
            edges.append((message, node, 0.0))
            continue
        for source in (Action(kind, of, node.chunk) for kind in ((F,) if forward else (B, I))):
            if source in takes:
                edges.append((source, node, link if shape.owners[of] != shape.owners[node.span] else 0.0))
    ends = dict(takes)
    moved = True
    while moved:
        moved = False
        for first, second, seconds in edges:
            if (end := ends[first] + seconds + takes[second]) > ends[second]:
                ends[second] = end
                moved = True
    return ends
