"""asyncio's TLS connections with small buffers: a long-poll lasts, and there is one a job.

asyncio fills 256 KiB for each TLS connection, ten times what the rest of it takes: a thousand long-polls are a quarter
of a gigabyte. A request of ours fits in 4 KiB, and longer ones are read in parts. The name is not public: a test fails
where asyncio changes it.
"""

from asyncio.sslproto import SSLProtocol

READ_BYTES = 4 * 1024


def shrink() -> None:
    """Lets connections that are opened from now on, of the whole process, have small buffers."""
    SSLProtocol.max_size = READ_BYTES
