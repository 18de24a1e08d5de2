"""Retries storage operations after temporary errors, such as a lost request or a server that restarts."""

import errno
import functools
import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds from the first attempt until retries end. All time limits of callers are longer.
PATIENCE_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 10.0
#: Errors that stay until a person changes something. They are not retried.
_FINAL = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EFBIG,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
#: Of these, the errors that end once the owner of the storage frees room or grants rights.
_MENDABLE = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}
_FINAL_TYPES = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def tried_again(operation: Callable[P, T]) -> Callable[P, T]:
    """Make a function retry `operation`, which must be idempotent, with growing pauses for up to `PATIENCE_SECONDS`.

    The function raises only `OSError`. A storage library may raise any error, also one that the trainer would take for
    a broken connection between workers.
    """
    return tried_again_unless()(operation)


def tried_again_unless(*final: type[Exception]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """As `tried_again`, except that errors of the types `final` are raised at once and unchanged."""

    def decorate(operation: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(operation)
        def wrapped(*arguments: P.args, **named: P.kwargs) -> T:
            pause, deadline = FIRST_PAUSE_SECONDS, time.monotonic() + PATIENCE_SECONDS
            while True:
                try:
                    return operation(*arguments, **named)
                except final:
                    raise
                except Exception as error:
                    if _is_final(error) or time.monotonic() + pause > deadline:
                        if isinstance(error, OSError):
                            raise
                        raise OSError(f"{type(error).__name__}: {error}") from error
                    logger.warning("storage: %s: %s; trying again", type(error).__name__, error)
                time.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)

        return wrapped

    return decorate


def _is_final(error: Exception) -> bool:
    return isinstance(error, _FINAL_TYPES) or (isinstance(error, OSError) and error.errno in _FINAL)


def may_pass(error: BaseException | None) -> bool:
    """Whether the same operation may succeed later: the storage is unreachable, full, or refuses access.

    False for other errors, such as a wrong location.
    """
    if not isinstance(error, OSError):
        return False
    return isinstance(error, PermissionError) or error.errno in _MENDABLE or not _is_final(error)
