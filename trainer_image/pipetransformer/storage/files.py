"""The file operations that checkpoints need, for mounted paths and fsspec URLs alike."""

import contextlib
import os
import secrets
from collections.abc import Iterable
from glob import has_magic
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from .retries import tried_again, tried_again_unless

#: Protocols of stores without folders. For these `makedirs` is skipped: s3fs would look for the bucket before every
#: write and try to create it if it cannot see it, for which a trainer may have no rights.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}


class Folder:
    """A folder at an absolute path or an fsspec URL. Its methods raise `OSError` only, whatever the storage; the
    constructor may raise anything."""

    def __init__(self, location: str) -> None:
        self.filesystem, self.root = _open(location)

    @property
    def _without_folders(self) -> bool:
        protocol = self.filesystem.protocol
        return not _WITHOUT_FOLDERS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    def path(self, *parts: str) -> str:
        return "/".join([self.root.rstrip("/"), *parts])

    @tried_again
    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically, and durably if the filesystem supports it.

        `name` may include one folder, such as `step-1/embedding.safetensors`. Object stores write atomically; a local
        file gets its name only after its bytes are on the disk.
        """
        path = self.path(name)
        if not self._without_folders:
            self.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        if not isinstance(self.filesystem, LocalFileSystem):
            self.filesystem.pipe_file(path, content)
            return
        partial = f"{path}.{secrets.token_hex(4)}.partial"  # not the pid, which may be equal in two pods
        try:
            with open(partial, "wb") as file:  # noqa: PTH123 - fsspec's paths are strings
                file.write(content)
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
        """Sorted names of the entries in this folder; empty if it does not exist. An S3 console represents an empty
        folder by an object of the folder's name, which is left out."""
        try:
            paths: Iterable[str] = self._listed(self.root, detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/") for path in paths)
        return sorted(name.rpartition("/")[2] for name in names if name != self.path())

    @tried_again
    def sizes(self, name: str) -> dict[str, int]:
        """Bytes of each file in a sub-folder, by name."""
        files = self._listed(self.path(name), detail=True)
        return {file["name"].rpartition("/")[2]: int(file["size"]) for file in files if file["type"] == "file"}

    def _listed(self, path: str, *, detail: bool) -> Any:
        """The current listing. The filesystem's cache of listings is shared, so another thread may fill it between
        `invalidate_cache` and `ls`; object stores are therefore asked to refresh."""
        self.filesystem.invalidate_cache()
        return self.filesystem.ls(path, detail=detail, **({"refresh": True} if self._without_folders else {}))

    def try_out(self) -> None:
        """Write a file and remove it, so that a job without write access fails before it trains."""
        name = f".tried-{secrets.token_hex(4)}"  # unique, because some stores do not allow a file to be replaced
        self.write(name, b"to be written")
        with contextlib.suppress(Exception):  # some stores do not allow a new file to be removed
            self.filesystem.rm_file(self.path(name))

    def remove(self, name: str) -> None:
        """Remove a sub-folder and its contents, without retries, because it is only cleaned up. It may already be gone,
        because other workers clean up, too."""
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
        """Remove the files of a folder whose name contains pattern characters, which `rm` would expand."""
        self.filesystem.invalidate_cache()
        for file in self.filesystem.find(path):
            self.filesystem.rm_file(file)
        with contextlib.suppress(Exception):  # an object store has no folders
            self.filesystem.rmdir(path)


# A wrong location is not retried. Other errors are, because some libraries connect here.
@tried_again_unless(ImportError, TypeError, ValueError)
def _open(location: str) -> tuple[fsspec.AbstractFileSystem, str]:
    filesystem, root = fsspec.core.url_to_fs(location)
    return filesystem, root
