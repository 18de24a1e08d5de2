"""The few operations on files that a checkpoint needs, alike on a mounted path and on an fsspec URL."""

import contextlib
import os
import secrets
from collections.abc import Iterable
from glob import has_magic
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from .retries import tried_again, tried_again_unless

#: Protocols of stores that know no folders. In place of one, s3fs makes the bucket where that is missing or cannot be
#: seen, for which a trainer may have no rights; and it asks for it before every write.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}


class Folder:
    """A folder at an absolute path or an fsspec URL. What fails in it is an `OSError`, whatever the storage; but where
    nothing here can open it."""

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
        """Write a file whole or not at all, and durably where the filesystem can promise it.

        `name` may hold one folder, such as `step-1/embedding.safetensors`. An object store puts atomically; a local
        file gets its name only once its bytes are on the disk.
        """
        path = self.path(name)
        if not self._without_folders:
            self.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        if not isinstance(self.filesystem, LocalFileSystem):
            self.filesystem.pipe_file(path, content)
            return
        partial = f"{path}.{secrets.token_hex(4)}.partial"  # in pods, writers may have the same pid
        try:
            with open(partial, "wb") as file:  # noqa: PTH123 - fsspec's paths are strings
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)  # noqa: PTH105
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)  # noqa: PTH108 - nobody would write over it
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
        """Names of what is directly in this folder, sorted; none when it does not exist. A console of S3 keeps an empty
        folder as a file of its name, which is none."""
        try:
            paths: Iterable[str] = self._listed(self.root, detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/") for path in paths)
        return sorted(name.rpartition("/")[2] for name in names if name != self.path())

    @tried_again
    def sizes(self, name: str) -> dict[str, int]:
        """Bytes of each file in a folder that lies in this one, by name."""
        files = self._listed(self.path(name), detail=True)
        return {file["name"].rpartition("/")[2]: int(file["size"]) for file in files if file["type"] == "file"}

    def _listed(self, path: str, *, detail: bool) -> Any:
        """As storage has it now. A filesystem keeps listings, and all threads share it: one may put another's back
        between `invalidate_cache` and `ls`."""
        self.filesystem.invalidate_cache()
        return self.filesystem.ls(path, detail=detail, **({"refresh": True} if self._without_folders else {}))

    def try_out(self) -> None:
        """Write a file and remove it, so that nothing trains that could not be kept."""
        name = f".tried-{secrets.token_hex(4)}"  # where nobody may replace a file, as two of one name would
        self.write(name, b"to be written")
        with contextlib.suppress(Exception):  # a store may keep what it has for a time
            self.filesystem.rm_file(self.path(name))

    def remove(self, name: str) -> None:
        """Remove a folder that lies in this one, with all that it holds, in one try: nobody counts on it. It may have
        gone already: others remove, too."""
        path = self.path(name)
        try:
            with contextlib.suppress(FileNotFoundError):
                if has_magic(path) and not isinstance(self.filesystem, LocalFileSystem):
                    self._remove_files(path)
                else:
                    self.filesystem.rm(path, recursive=True)
            if self._without_folders and self.filesystem.exists(path):  # s3fs does not say what the store refused
                raise PermissionError(f"{path} was not removed: the store lets nobody, or not this worker")
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _remove_files(self, path: str) -> None:
        """Of a folder whose name most filesystems would take for a pattern, and remove what matches it."""
        self.filesystem.invalidate_cache()
        for file in self.filesystem.find(path):
            self.filesystem.rm_file(file)
        with contextlib.suppress(Exception):  # an object store has no folders
            self.filesystem.rmdir(path)


# A location that is wrong is so tomorrow. Some libraries connect here, anew in each thread.
@tried_again_unless(ImportError, TypeError, ValueError)
def _open(location: str) -> tuple[fsspec.AbstractFileSystem, str]:
    filesystem, root = fsspec.core.url_to_fs(location)
    return filesystem, root
