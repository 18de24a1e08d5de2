"""A run as one picture: which layers were frozen and where they were cut, how wide it was, how many GPUs, and the loss.

`record` reads what the leader wrote down, `draw` makes a figure of it, `page` a document that needs nothing besides
itself.
"""

from .page import write
from .record import Record, read

__all__ = ["Record", "read", "write"]
