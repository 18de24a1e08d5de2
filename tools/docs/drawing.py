"""Enough of SVG for a picture of boxes, words and arrows, on a ground of its own so that it is read on any page."""

from collections.abc import Iterable
from html import escape

INK, FAINT, GROUND = "#22303c", "#5d6b78", "#f7f9fb"
FROZEN, ACTIVE, MOVED, FREED = "#a9cbe6", "#57a773", "#d9822b", "#c3ccd4"

_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif"'
    ' font-size="13">\n<title>{title}</title>\n'
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="{ink}"/></marker></defs>\n'
    '<rect width="{width}" height="{height}" rx="8" fill="{ground}"/>\n'
)


class Drawing:
    """A picture that grows by what is drawn on it; lengths are pixels, from the upper left corner."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._head = _HEAD.format(width=width, height=height, title=escape(title), ink=INK, ground=GROUND)
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = "white", line: str = FREED,
        dashed: bool = False,
    ) -> None:  # fmt: skip
        """A rectangle with round corners."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{line}"'
            f"{dashes}/>"
        )

    def words(
        self, x: float, y: float, text: str, *, colour: str = INK, middle: bool = False, bold: bool = False
    ) -> None:
        """A line of text on the base line `y`."""
        anchor = ' text-anchor="middle"' if middle else ""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" fill="{colour}"{anchor}{weight}>{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through the points, with its tip at the last."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = ' stroke-dasharray="4 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.4"{dashes} marker-end="url(#tip)"/>'
        )

    def line(self, start: tuple[float, float], end: tuple[float, float], *, colour: str = INK) -> None:
        """A straight line without a tip."""
        (x1, y1), (x2, y2) = start, end
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.4"/>'
        )

    def blocks(self, x: float, y: float, fills: Iterable[str], *, by_row: int = 5, size: float = 14) -> None:
        """Small squares, row by row: a model's blocks."""
        for place, fill in enumerate(fills):
            row, column = divmod(place, by_row)
            self.box(x + column * (size + 3), y + row * (size + 3), size, size, fill=fill, line="white")

    def text(self) -> str:
        """The file."""
        return self._head + "\n".join(self._parts) + "\n</svg>\n"
