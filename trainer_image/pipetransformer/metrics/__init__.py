"""A worker's metrics for Prometheus: some are counted during training, others are read at each scrape."""

from .collector import Position
from .meter import Meter
from .server import serve

__all__ = ["Meter", "Position", "serve"]
