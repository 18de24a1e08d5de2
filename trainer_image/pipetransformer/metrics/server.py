"""Serves the page `/metrics` in its own thread."""

import contextlib
import logging
from collections.abc import Iterator

import torch
from prometheus_client import ProcessCollector, disable_created_metrics, start_http_server

from .collector import PositionCollector, Positioned
from .meter import Meter

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def serve(meter: Meter, worker: Positioned, device: torch.device, address: str, port: int | None) -> Iterator[None]:
    """A context that serves `/metrics`, if there is a port. If the port is taken, it logs a warning and training goes
    on."""
    if port is None:
        yield
        return
    disable_created_metrics()  # type: ignore[no-untyped-call]
    meter.registry.register(PositionCollector(worker, device))
    ProcessCollector(registry=meter.registry)
    try:
        server, thread = start_http_server(port, address, meter.registry)
    except OSError as error:
        logger.warning("no metrics: %s port %d: %s", address, port, error)
        yield
        return
    ends = False
    try:
        yield
    except SystemExit:
        ends = True  # the process ends with its threads; this one would need up to half a second to stop
        raise
    finally:
        if not ends:
            server.shutdown()
            server.server_close()
            thread.join()
