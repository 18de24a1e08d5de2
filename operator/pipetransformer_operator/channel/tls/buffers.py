"""Small buffers for asyncio's TLS connections, because every job keeps a long-poll open.

asyncio allocates 256 KiB for each TLS connection, ten times the rest of its memory: 256 MiB for a thousand long-polls.
Our requests fit in 4 KiB, and longer ones are read in parts. By default, 64 KiB that a slow reader has not taken wait
below TLS before the writer pauses. The names are not public: a test fails if asyncio changes one.
"""

from asyncio import BaseTransport, WriteTransport
from asyncio.sslproto import SSLProtocol

READ_BYTES = 4 * 1024
#: Bytes of an answer that wait for a slow reader, once below TLS and once in it.
WRITE_BYTES = 8 * 1024
_connection_made = SSLProtocol.connection_made


def shrink() -> None:
    """Gives small buffers to all TLS connections that this process opens from now on."""
    SSLProtocol.max_size = READ_BYTES
    SSLProtocol.connection_made = _made  # type: ignore[method-assign, assignment]


def _made(protocol: SSLProtocol, transport: BaseTransport) -> None:
    assert isinstance(transport, WriteTransport)
    transport.set_write_buffer_limits(high=WRITE_BYTES)
    _connection_made(protocol, transport)
