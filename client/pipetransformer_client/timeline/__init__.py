"""Draws a run as one picture: layouts and frozen layers, GPUs, speed, loss and held-out metrics over time.

`record` reads the record of a run, `draw` makes an SVG of it, and `page` writes a self-contained HTML page.
"""

from .draw import draw
from .page import WIDTHS, write_timeline
from .record import Record, read_record

__all__ = ["WIDTHS", "Record", "draw", "read_record", "write_timeline"]
