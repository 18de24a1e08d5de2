"""What the pictures of docs/concepts.md need beside boxes and words: arrows, and layers as small squares."""

from collections.abc import Iterable

from pipetransformer_client.timeline.drawing import INK, Drawing

_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>'
)


class Sketch(Drawing):
    """A drawing with arrows."""

    def __init__(self, title: str, width: float, height: float) -> None:
        super().__init__(title, width, height)
        self.add(_TIP)

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through the points, with its tip at the last."""
        self.polyline(points, dashes="4 4" if dashed else "", tip="tip")

    def blocks(self, x: float, y: float, fills: Iterable[str], *, by_row: int = 5, size: float = 14) -> None:
        """Small squares, row by row: a model's blocks."""
        for place, fill in enumerate(fills):
            row, column = divmod(place, by_row)
            self.box(x + column * (size + 3), y + row * (size + 3), size, size, fill=fill, line="white")
