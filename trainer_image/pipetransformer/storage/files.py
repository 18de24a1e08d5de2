"""File operations of checkpoints and models, on mounted paths and on fsspec URLs."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from glob import has_magic
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from .retries import tried_again, tried_again_unless

#: Protocols of stores without folders. `makedirs` is skipped for them. With it s3fs would look for the bucket before
#: every write, and would try to create a bucket that it cannot see. A trainer may have no right to do either.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}


class Folder:
    """A folder at an absolute path or an fsspec URL. All methods raise only `OSError`; the constructor may raise any
    error."""

    def __init__(self, location: str) -> None:
        self.filesystem, self.root = _open(location)

    @property
    def _without_folders(self) -> bool:
        protocol = self.filesystem.protocol
        return not _WITHOUT_FOLDERS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    def path(self, *parts: str) -> str:
        return "/".join([self.root.rstrip("/"), *parts])

    @tried_again
    def write(self, name: str, *parts: bytes | memoryview) -> None:
        """Write a file of these parts atomically, and durably if the filesystem supports it.

        `name` may include one folder, such as `step-1/embedding.safetensors`. Object stores write atomically; a local
        file gets its name only after its bytes are on the disk.
        """
        path = self.path(name)
        if not self._without_folders:
            self.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        if not isinstance(self.filesystem, LocalFileSystem):
            self.filesystem.pipe_file(path, b"".join(parts))
            return
        partial = f"{path}.{secrets.token_hex(4)}.partial"  # not the process id, which may be the same in two pods
        try:
            with open(partial, "wb") as file:  # noqa: PTH123 - fsspec's paths are strings
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)  # noqa: PTH105
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)  # noqa: PTH108
            raise
        directory = os.open(path.rpartition("/")[0], os.O_RDONLY)
        try:
            os.fsync(directory)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the filesystem cannot do it, as CIFS before Linux 5.10
                raise
        finally:
            os.close(directory)

    @tried_again
    def read(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: it does not exist.
        """
        self.filesystem.invalidate_cache()
        content: bytes = self.filesystem.cat_file(self.path(name))
        return content

    @tried_again
    def exists(self, name: str) -> bool:
        self.filesystem.invalidate_cache()
        return bool(self.filesystem.exists(self.path(name)))

    @tried_again
    def names(self) -> list[str]:
        """Sorted names of files and folders in this folder; empty if the folder does not exist.

        S3 consoles create an object with the folder's own name for an empty folder. It is left out.
        """
        try:
            paths: Iterable[str] = self._listed(self.root, detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/") for path in paths)
        return sorted(name.rpartition("/")[2] for name in names if name != self.path())

    @tried_again
    def sizes(self, name: str) -> dict[str, int]:
        """Sizes in bytes of the files in the sub-folder `name`, by file name."""
        files = self._listed(self.path(name), detail=True)
        return {file["name"].rpartition("/")[2]: int(file["size"]) for file in files if file["type"] == "file"}

    def _listed(self, path: str, *, detail: bool) -> Any:
        """List a folder as it is now, not from fsspec's cache.

        Threads share this cache, so another thread may fill it between `invalidate_cache` and `ls`. So object stores
        get `refresh`, too.
        """
        self.filesystem.invalidate_cache()
        return self.filesystem.ls(path, detail=detail, **({"refresh": True} if self._without_folders else {}))

    def try_out(self) -> None:
        """Check that this folder can be written, by a file that is then removed. So a job fails before it trains."""
        name = f".tried-{secrets.token_hex(4)}"  # unique, because some stores do not allow a file to be replaced
        self.write(name, b"to be written")
        with contextlib.suppress(Exception):  # some stores do not allow a new file to be removed
            self.filesystem.rm_file(self.path(name))

    def remove(self, name: str) -> None:
        """Remove a sub-folder and its contents. Does nothing if it is gone, because other workers clean up, too.

        Does not retry, because the next clean-up will remove what is left.
        """
        path = self.path(name)
        try:
            with contextlib.suppress(FileNotFoundError):
                if has_magic(path) and not isinstance(self.filesystem, LocalFileSystem):
                    self._remove_files(path)
                else:
                    self.filesystem.rm(path, recursive=True)
            if self._without_folders and self.filesystem.exists(path):  # s3fs does not report that the store refused
                raise PermissionError(f"{path} was not removed: the store does not allow it")
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _remove_files(self, path: str) -> None:
        """Remove the files of a folder one by one, because `rm` would expand pattern characters in its name."""
        self.filesystem.invalidate_cache()
        for file in self.filesystem.find(path):
            self.filesystem.rm_file(file)
        with contextlib.suppress(Exception):  # an object store has no folders
            self.filesystem.rmdir(path)


# These three errors mean a wrong location. Other errors are retried, because some libraries connect to the store here.
@tried_again_unless(ImportError, TypeError, ValueError)
def _open(location: str) -> tuple[fsspec.AbstractFileSystem, str]:
    filesystem, root = fsspec.core.url_to_fs(location)
    return filesystem, root
