"""Draws boxes, lines and text as SVG. Each picture has its own background, so that it is legible on any page."""

from collections.abc import Iterable
from html import escape

INK, FAINT, GROUND = "#22303c", "#5d6b78", "#f7f9fb"
FROZEN, ACTIVE, MOVED, FREED = "#a9cbe6", "#57a773", "#d9822b", "#c3ccd4"

FONT_SIZE = 13
_EM, _BOLD_EM = 0.66, 0.74  #: mean width of a character in the widest common font, as a share of the font size
_NARROW, _NARROW_SHARE = frozenset(" .,:;'|()[]/-fijlrt"), 0.65
_APART = 2  #: pixels around a label

_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="system-ui, sans-serif"'
    ' font-size="{size}" role="img">\n<title>{title}</title>\n'
    '<rect width="{width:g}" height="{height:g}" rx="8" fill="{ground}"/>\n'
)
_ANCHORS = {"start": 0.0, "middle": 0.5, "end": 1.0}


def text_width(text: str, *, bold: bool = False) -> float:
    """Upper bound for the width of a line of text, in pixels."""
    characters = sum(_NARROW_SHARE if character in _NARROW else 1 for character in text)
    return characters * FONT_SIZE * (_BOLD_EM if bold else _EM)


class Drawing:
    """A picture. Lengths are in pixels, coordinates start at the upper left corner."""

    def __init__(self, title: str, width: float, height: float) -> None:
        self.width = width
        self._height = height
        self._head = _HEAD.format(width=width, height=height, size=FONT_SIZE, title=escape(title), ground=GROUND)
        self._parts: list[str] = []
        self._labels: list[tuple[float, float, float, float]] = []

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = "white", line: str = FREED,
        dashed: bool = False, radius: float = 4,
    ) -> None:  # fmt: skip
        """Draws a rectangle, with round corners unless `radius` is 0."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.add(
            f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" rx="{radius}" fill="{fill}"'
            f' stroke="{line}"{dashes}/>'
        )

    def polyline(
        self, points: Iterable[tuple[float, float]], *, colour: str = INK, width: float = 1.4, dashes: str = "",
        fill: str = "none", opacity: float = 1, tip: str = "",
    ) -> None:  # fmt: skip
        """Draws a line through the points. `tip` is the id of an SVG marker at its end, such as an arrow's tip."""
        path = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
        style = f' stroke-dasharray="{dashes}"' if dashes else ""
        style += f' opacity="{opacity:g}"' if opacity < 1 else ""
        style += f' marker-end="url(#{tip})"' if tip else ""
        self.add(f'<polyline points="{path}" fill="{fill}" stroke="{colour}" stroke-width="{width:g}"{style}/>')

    def words(
        self, x: float, y: float, text: str, *, colour: str = INK, anchor: str = "start", bold: bool = False,
        halo: bool = False,
    ) -> None:  # fmt: skip
        """Writes a line of text. `y` is its base line. With `halo`, a pale outline keeps it legible over lines."""
        style = "" if anchor == "start" else f' text-anchor="{anchor}"'
        style += ' font-weight="600"' if bold else ""
        style += f' stroke="{GROUND}" stroke-width="3" stroke-opacity=".7" paint-order="stroke"' if halo else ""
        self.add(f'<text x="{x:.5g}" y="{y:.5g}" fill="{colour}"{style}>{escape(text)}</text>')

    def label(
        self, x: float, y: float, text: str, *, colour: str = INK, anchor: str = "start", bold: bool = False
    ) -> bool:
        """Writes text, shifted so that it is inside the picture. If it would touch another label, writes nothing.

        Returns whether it was written.
        """
        width = text_width(text, bold=bold)
        left = min(max(x - _ANCHORS[anchor] * width, _APART), self.width - _APART - width)
        box = (left - _APART, y - FONT_SIZE, left + width + _APART, y + 0.3 * FONT_SIZE)
        free = left > 0 and all(
            box[2] <= other[0] or other[2] <= box[0] or box[3] <= other[1] or other[3] <= box[1]
            for other in self._labels
        )
        if free:
            self._labels.append(box)
            place = left + _ANCHORS[anchor] * width
            self.words(place, y, text, colour=colour, anchor=anchor, bold=bold, halo=True)
        return free

    def add(self, element: str) -> None:
        """Adds an SVG element as it is."""
        self._parts.append(element)

    def text(self) -> str:
        """The SVG as text."""
        return self._head + "\n".join(self._parts) + "\n</svg>\n"
