"""A run as one picture: layouts and frozen layers, GPUs, speed, loss and held-out metrics over time.

`record` reads what the leader wrote down, `draw` makes an SVG of it, and `page` writes that with figures as a document
that loads nothing.
"""

from .draw import draw
from .page import WIDTHS, write
from .record import Record, read

__all__ = ["WIDTHS", "Record", "draw", "read", "write"]
