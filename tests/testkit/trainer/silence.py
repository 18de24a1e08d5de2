"""An address at which nobody listens."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def nobody_listens() -> Iterator[str]:
    """Holds the port, which another process could take otherwise, and listen there."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{silent.getsockname()[1]}"
