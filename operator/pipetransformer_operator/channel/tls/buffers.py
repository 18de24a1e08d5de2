"""asyncio's TLS connections with small buffers: a long-poll lasts, and there is one a job.

asyncio fills 256 KiB for each TLS connection, ten times what the rest of it takes: a thousand long-polls are a quarter
of a gigabyte. A request of ours fits in 4 KiB, and longer ones are read in parts. What a slow reader has not taken is
kept below TLS, 64 KiB of it, before the writer has to wait. The names are not public: a test fails where asyncio
changes one.
"""

from asyncio import BaseTransport, WriteTransport
from asyncio.sslproto import SSLProtocol

READ_BYTES = 4 * 1024
#: What is kept of an answer for a reader that does not take it, once below TLS and once in it.
WRITE_BYTES = 8 * 1024
_connection_made = SSLProtocol.connection_made


def shrink() -> None:
    """Lets connections that are opened from now on, of the whole process, have small buffers."""
    SSLProtocol.max_size = READ_BYTES
    SSLProtocol.connection_made = _made  # type: ignore[method-assign, assignment]


def _made(protocol: SSLProtocol, transport: BaseTransport) -> None:
    assert isinstance(transport, WriteTransport)
    transport.set_write_buffer_limits(high=WRITE_BYTES)
    _connection_made(protocol, transport)
