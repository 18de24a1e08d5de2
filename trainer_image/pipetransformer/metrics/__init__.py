"""What Prometheus sees of a worker: counted beside the training, read when it is asked for."""

from .collector import Position
from .meter import Meter
from .server import serve

__all__ = ["Meter", "Position", "serve"]
