"""The pictures of docs/concepts.md. README and the front page show the one of a pack, and on a phone a narrow one."""

from pipetransformer_client.timeline.drawing import ACTIVE, FAINT, FREED, FROZEN, MOVED
from tools.docs.sketch import Sketch

_PACK = "Four stages become two as eight of twelve blocks freeze"
_FRONT, _BACK = [FROZEN] * 8 + [ACTIVE] * 2, [ACTIVE] * 2
_LEGEND = ((ACTIVE, "trains"), (FROZEN, "frozen: forward only, no optimizer state"))


def rendered() -> dict[str, str]:
    """Each picture by its file name."""
    return {
        "pack.svg": _pack(),
        "pack-narrow.svg": _pack_narrow(),
        "regroup.svg": _regroup(),
        "cache.svg": _cache(),
        "copies.svg": _copies(),
    }


def _pack() -> str:
    drawing = Sketch(_PACK, 960, 306)
    drawing.words(24, 34, "nothing frozen: 1 pipeline of 4 stages", bold=True)
    for number in range(4):
        _gpu(drawing, 24 + 106 * number, 118, f"GPU {number}", [ACTIVE] * 3)
    drawing.words(24, 98, "pipeline 0", colour=FAINT)
    drawing.words(24, 262, "each square is a block", colour=FAINT)
    _legend(drawing, 24, 278)
    drawing.words(500, 34, "8 of 12 frozen, onPack: Widen: 2 pipelines of 2", bold=True)
    drawing.words(500, 176, "or onPack: Release: 1 pipeline of 2, and 2 GPUs go", bold=True)
    for number, fills in enumerate((_FRONT, _BACK, _FRONT, _BACK)):
        _gpu(drawing, 500 + 108 * number, 50, f"GPU {number}", fills)
        if number < 2:
            _gpu(drawing, 500 + 108 * number, 192, f"GPU {number}", fills)
        else:
            drawing.box(500 + 108 * number, 192, 98, 84, fill="none", dashed=True)
            drawing.words(549 + 108 * number, 238, "given back", colour=FAINT, anchor="middle")
    drawing.words(500, 154, "pipeline 0", colour=FAINT)
    drawing.words(716, 154, "pipeline 1: other samples", colour=FAINT)
    drawing.arrow((446, 152), (490, 96))
    drawing.arrow((446, 168), (490, 226))
    return drawing.text()


def _pack_narrow() -> str:
    """The same from top to bottom."""
    drawing = Sketch(_PACK, 360, 520)
    lefts = [12 + 85 * number for number in range(4)]
    drawing.words(12, 26, "nothing frozen: 1 pipeline of 4 stages", bold=True)
    drawing.arrow((180, 104), (180, 128))
    drawing.words(12, 148, "8 of 12 frozen, onPack: Widen:", bold=True)
    drawing.words(12, 166, "2 pipelines of 2", bold=True)
    drawing.words(lefts[0], 288, "pipeline 0", colour=FAINT)
    drawing.words(lefts[2], 288, "pipeline 1: other samples", colour=FAINT)
    drawing.words(12, 318, "or onPack: Release:", bold=True)
    drawing.words(12, 336, "1 pipeline of 2, and 2 GPUs go", bold=True)
    for number, (x, fills) in enumerate(zip(lefts, (_FRONT, _BACK, _FRONT, _BACK), strict=True)):
        _gpu(drawing, x, 38, f"GPU {number}", [ACTIVE] * 3, size=(80, 58), by_row=4)
        _gpu(drawing, x, 178, f"GPU {number}", fills, size=(80, 92), by_row=4)
        if number < 2:
            _gpu(drawing, x, 348, f"GPU {number}", fills, size=(80, 92), by_row=4)
        else:
            drawing.box(x, 348, 80, 92, fill="none", dashed=True)
            drawing.words(x + 40, 398, "given back", colour=FAINT, anchor="middle")
    drawing.words(12, 466, "each square is a block", colour=FAINT)
    for place, (fill, word) in enumerate(_LEGEND):
        drawing.box(12, 478 + 20 * place, 12, 12, fill=fill, line="white")
        drawing.words(30, 489 + 20 * place, word, colour=FAINT)
    return drawing.text()


def _gpu(
    drawing: Sketch, x: float, y: float, name: str, fills: list[str], *, size: tuple[float, float] = (98, 84),
    by_row: int = 5,
) -> None:  # fmt: skip
    drawing.box(x, y, *size)
    drawing.words(x + 8, y + 20, name)
    drawing.blocks(x + 8, y + 32, fills, by_row=by_row)


def _legend(drawing: Sketch, x: float, y: float) -> None:
    for place, (fill, word) in enumerate(_LEGEND):
        drawing.box(x + 80 * place, y, 14, 14, fill=fill, line="white")
        drawing.words(x + 20 + 80 * place, y + 12, word, colour=FAINT)


_LANES = ("operator", "worker 0, leader", "worker 1", "worker 2, leaves", "worker 3, joins")
_START, _PAUSE, _AFTER, _END = 160, 560, 650, 930


def _regroup() -> str:
    drawing = Sketch("A regroup: prepare, commit, clean", 960, 318)
    for x, width, name in (
        (_START + 100, _PAUSE - _START - 104, "Prepare: the old layout trains"),
        (_PAUSE, _AFTER - _PAUSE, "Commit"),
        (_AFTER + 4, _END - _AFTER - 4, "Clean"),
    ):
        drawing.box(x, 16, width, 24, fill="#e6ecf1")
        drawing.words(x + width / 2, 33, name, anchor="middle", bold=True)
    tops = {name: 56 + 46 * place for place, name in enumerate(_LANES)}
    for name, top in tops.items():
        drawing.words(20, top + 20, name)
    operator = tops["operator"]
    for x, width, word in ((_START + 100, 150, "plan: generation 2"), (_PAUSE - 106, 100, "publish it"),
                           (_AFTER + 60, 150, "delete leavers' pods")):  # fmt: skip
        drawing.box(x, operator, width, 28)
        drawing.words(x + width / 2, operator + 19, word, anchor="middle")
    for name in _LANES[1:4]:
        _bar(drawing, _START, _PAUSE, tops[name], ACTIVE, "trains in generation 1")
    for name in (_LANES[1], _LANES[2], _LANES[4]):
        _bar(drawing, _AFTER, _END, tops[name], ACTIVE, "trains in generation 2")
    for name in _LANES[1:]:
        _bar(drawing, _PAUSE, _AFTER, tops[name], MOVED, "regroups")
    _bar(drawing, _AFTER, _AFTER + 130, tops[_LANES[3]], FREED, "exits")
    _bar(drawing, _START + 260, _PAUSE, tops[_LANES[4]], FREED, "starts, warms up")
    leader = tops[_LANES[1]]
    drawing.arrow((_START + 60, leader), (_START + 60, operator + 14), (_START + 98, operator + 14))
    drawing.words(_START - 22, operator + 8, "report: frozen", colour=FAINT)
    drawing.arrow((_PAUSE - 56, operator + 28), (_PAUSE - 56, leader - 2))
    drawing.arrow((_AFTER + 30, leader), (_AFTER + 30, operator + 14), (_AFTER + 58, operator + 14))
    drawing.words(
        20,
        302,
        "Orange: all stop at one step, meet, move layers, vote. Only this is a pause of the training.",
        colour=FAINT,
    )
    return drawing.text()


def _bar(drawing: Sketch, start: float, end: float, top: float, fill: str, word: str) -> None:
    drawing.box(start, top, end - start, 28, fill=fill, line="white")
    drawing.words((start + end) / 2, top + 19, word, anchor="middle")


def _cache() -> str:
    drawing = Sketch("The cache of frozen blocks", 960, 250)
    for top, title in ((24, "first epoch after a freeze"), (140, "each epoch after it")):
        first = top < 100
        drawing.words(24, top + 10, title, bold=True)
        drawing.box(24, top + 30, 110, 56)
        drawing.words(79, top + 63, "sample 17", anchor="middle")
        drawing.box(200, top + 22, 420, 72)
        drawing.words(212, top + 40, "first worker of the pipeline", colour=FAINT)
        drawing.blocks(212, top + 52, [FROZEN] * 8 if first else ["#edf2f6"] * 8, by_row=8, size=22)
        drawing.blocks(540, top + 52, [ACTIVE] * 3, by_row=3, size=22)
        drawing.box(700, top + 22, 230, 72)
        drawing.words(712, top + 40, "next workers", colour=FAINT)
        drawing.blocks(712, top + 52, [ACTIVE] * 6, by_row=6, size=22)
        drawing.arrow((136, top + 62), (198, top + 62), dashed=not first)
        drawing.arrow((622, top + 62), (698, top + 62))
        drawing.box(438, top + 48, 76, 30, fill="#fff4e6", line=MOVED)
        drawing.words(476, top + 68, "cache", anchor="middle")
        if first:
            drawing.arrow((412, top + 63), (436, top + 63))
        drawing.arrow((516, top + 63), (538, top + 63))
    drawing.words(150, 194, "key", colour=FAINT)
    return drawing.text()


def _copies() -> str:
    drawing = Sketch("Where the copies of a stage are", 960, 250)
    for left, title in (
        (24, "two pipelines: replicas"),
        (344, "one pipeline: mirrors"),
        (664, "no worker left: checkpoint"),
    ):
        drawing.words(left, 30, title, bold=True)
    for pipeline in range(2):
        for stage in range(2):
            _stage(drawing, 24 + 140 * stage, 52 + 96 * pipeline, f"stage {stage}", lost=(pipeline, stage) == (0, 1))
    drawing.arrow((224, 146), (224, 120))
    drawing.words(232, 138, "copy", colour=FAINT)
    for stage in range(3):
        _stage(drawing, 344 + 98 * stage, 52, f"stage {stage}", width=86, lost=stage == 1)
        drawing.box(344 + 98 * stage, 138, 86, 40, fill="#fff4e6", line=MOVED)
        drawing.words(387 + 98 * stage, 163, f"of stage {(stage - 1) % 3}", anchor="middle")
    drawing.words(344, 198, "host memory of the next worker", colour=FAINT)
    drawing.arrow((583, 138), (520, 120), (474, 120))
    _stage(drawing, 664, 52, "stage 0", lost=True)
    _stage(drawing, 804, 52, "stage 1", lost=True)
    drawing.box(664, 148, 260, 40, fill="#e6ecf1")
    drawing.words(794, 173, "files on a volume or an object store", anchor="middle")
    drawing.arrow((724, 148), (724, 120))
    drawing.arrow((864, 148), (864, 120))
    drawing.words(24, 234, "A dashed worker is lost; an arrow says where its stage comes from.", colour=FAINT)
    return drawing.text()


def _stage(drawing: Sketch, x: float, y: float, name: str, *, width: float = 120, lost: bool = False) -> None:
    drawing.box(x, y, width, 66, fill="none" if lost else "white", line="#c2452d" if lost else FREED, dashed=lost)
    drawing.words(x + 10, y + 22, name)
    drawing.blocks(x + 10, y + 36, ["#edf2f6" if lost else ACTIVE] * 4, by_row=4, size=13)
