"""The pictures of docs/schedules.md: the very lists, played with a forward of 1 and a backward of 2 for each layer."""

from dataclasses import replace

from pipetransformer.schedules import (
    Action,
    ActionKind,
    Ahead,
    GPipe,
    OneForwardOneBackward,
    RoundCosts,
    RoundSeconds,
    RoundShape,
    Schedule,
    TeraPipe,
    planned,
    simulate,
)
from pipetransformer.schedules.from_torch import Interleaved, ZeroBubble, ZeroBubbleV
from pipetransformer_client.timeline.drawing import ACTIVE, FAINT, FROZEN, MOVED, Drawing

WORKERS, LAYERS, MICRO_BATCHES = 4, 8, 6
_WIDTH, _LEFT, _TOP, _ROW = 360.0, 22.0, 14.0, 20.0  # narrow enough for a phone
_WEIGHTS = "#8d6cab"
#: Colours of a computation, for even and for odd chunks.
_FILLS = {
    ActionKind.FORWARD: (ACTIVE, "#86c79c"),
    ActionKind.PREFIX: (FROZEN, "#cfe3f2"),
    ActionKind.BACKWARD: (MOVED, "#eeb27a"),
    ActionKind.INPUT_GRADIENT: (MOVED, "#eeb27a"),
    ActionKind.WEIGHT_GRADIENT: (_WEIGHTS, "#b9a2cf"),
}
_FROZEN = _FILLS[ActionKind.PREFIX]
_LEGEND = ((ACTIVE, "forward"), (FROZEN, "frozen"), (MOVED, "backward"), (_WEIGHTS, "weights"))


def rendered() -> dict[str, str]:
    """Each picture by its file name."""
    one_each = tuple(range(WORKERS))
    pictures = {
        "gpipe": _drawn("GPipe", GPipe(), one_each),
        "1f1b": _drawn("1F1B", OneForwardOneBackward(), one_each),
        "interleaved": _drawn("Interleaved, two spans a worker", Interleaved(2), Interleaved(2).owners(WORKERS)),
        "zero-bubble": _drawn("ZeroBubble, two spans a worker", ZeroBubble(2), ZeroBubble(2).owners(WORKERS)),
        "zero-bubble-v": _drawn("ZeroBubbleV", ZeroBubbleV(), ZeroBubbleV().owners(WORKERS)),
        "terapipe": _drawn("TeraPipe, three slices of each of two micro-batches", TeraPipe(), one_each, slices=3),
        "ahead": _drawn("1F1B with four frozen layers one step ahead", OneForwardOneBackward(), one_each, ahead=True),
        "frozen": _drawn("1F1B behind four frozen layers", OneForwardOneBackward(), one_each, frozen=True),
    }
    return {f"schedule-{name}.svg": picture for name, picture in pictures.items()}


def _drawn(
    title: str,
    schedule: Schedule,
    owners: tuple[int, ...],
    *,
    slices: int = 1,
    frozen: bool = False,
    ahead: bool = False,
) -> str:
    """Workers over time. With `frozen` the first worker has the frozen half, and the others share the rest. With
    `ahead` all share the rest, and run the frozen half of the next round in idle time."""
    shape = RoundShape(owners, MICRO_BATCHES, int(frozen), slices)
    layers = [LAYERS / len(owners) / slices] * len(owners)
    prefix: tuple[float, ...] = ()
    if ahead:
        prefix, layers = (1.0,) * (LAYERS // 2), [LAYERS / 2 / len(owners)] * len(owners)
        seconds = RoundSeconds(tuple(layers), tuple(2 * count for count in layers), prefix)
        schedule = Ahead(schedule, seconds, tuple(range(WORKERS)))
        shape = replace(shape, prefix_units=len(prefix), prefix_made=True, next_chunks=MICRO_BATCHES)
    if frozen:
        layers = [LAYERS / 2, *[LAYERS / 2 / (len(owners) - 1)] * (len(owners) - 1)]
    lists = planned(schedule, shape)
    played = simulate(lists, shape, RoundCosts.by_span(layers, [2 * count for count in layers], prefix=prefix))
    drawing = Drawing(title, _WIDTH, _TOP + WORKERS * _ROW + 48)
    scale = (_WIDTH - _LEFT - 10) / played.seconds
    for worker, times in enumerate(played.times):
        top = _TOP + worker * _ROW
        drawing.words(8, top + 14, str(worker), colour=FAINT)
        computations = [operation for operation in lists[worker] if isinstance(operation, Action)]
        for action, (start, end) in zip(computations, times, strict=True):
            fills = _FILLS[action.kind] if shape.trains(action.span) else _FROZEN
            left, width = _LEFT + start * scale, (end - start) * scale
            drawing.box(left, top, width, _ROW - 4, fill=fills[action.chunk % 2], line="white", radius=1)
    bottom = _TOP + WORKERS * _ROW
    drawing.words(_LEFT, bottom + 14, f"idle: {played.mean_idle_share:.0%} of the round", colour=FAINT)
    for place, (fill, word) in enumerate(_LEGEND):
        drawing.box(_LEFT + 84 * place, bottom + 26, 12, 12, fill=fill, line="white")
        drawing.words(_LEFT + 84 * place + 16, bottom + 37, word, colour=FAINT)
    return drawing.text()
