"""Reads again after an error of a network filesystem or a connection, because such errors often pass by themselves."""

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds between two attempts. Their sum is less than the watchdog's smallest limit, so other workers still wait.
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
#: Numbers of errors that may pass. Other errors of connections have types of their own.
_MAY_PASS = {
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EIO,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.ESTALE,
}


def read_patiently(read: Callable[[], T]) -> T:
    """Call `read` and return its result. Call it again, for about 15 seconds, while it raises an error that may pass.

    Raises:
        Exception: what `read` raised in its last call.
    """
    for pause in _PAUSES:
        try:
            return read()
        except OSError as error:
            if not _may_pass(error):
                raise
            logger.warning("data: %s: %s; trying again", type(error).__name__, error)
        time.sleep(pause)
    return read()


def _may_pass(error: OSError) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) or error.errno in _MAY_PASS
