"""Finds the file in which a cache of this process keeps entries. It has no name."""

from pathlib import Path


def cache_file(folder: Path) -> Path:
    """A path by which tests read and change the only cache file in this folder."""
    (found,) = (file for file in Path("/proc/self/fd").iterdir() if folder in file.resolve().parents)
    return found
