"""Measures what a private `/dev/shm` in each pod costs: `python -m benchmarks.shared_memory` (root, one minute).

Two processes send tensors to each other by gloo, once with the `/dev/shm` of the machine in common and once with a
private one of 64 MB each, as containers have by default. Then they send the same bytes through a segment of shared
memory, which NCCL does between processes of one node that have `/dev/shm` in common; with a private one the segment is
not there. It prints GB/s, the best of 30, and writes nothing.
"""

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.testkit import ROOT
from tests.testkit.results import print_table

MIB = 1 << 20
SIZES = (1 * MIB, 8 * MIB, 32 * MIB)
ROUNDS = 30
#: Of the segment: half of it is written while the other half is read.
_SEGMENT = 4 * MIB
_PRIVATE = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'


def main() -> None:
    """Print the table."""
    rows = []
    for name, private in (("in common", False), ("private, 64 MB", True)):
        for transport in ("gloo", "segment"):
            said = _pair(transport, private=private)
            rows.append([name, transport, *said] if said else [name, transport, *["not there"] * len(SIZES)])
    columns = ["/dev/shm", "transport", *(f"GB/s at {size // MIB} MiB" for size in SIZES)]
    print_table("two processes of one machine", columns, rows)


def _pair(transport: str, *, private: bool) -> list[float]:
    """GB/s at each size; empty where the two cannot send this way."""
    with tempfile.TemporaryDirectory() as folder:
        before = ["unshare", "--mount", "sh", "-c", _PRIVATE, "sh"] if private else []
        command = [*before, sys.executable, "-m", "benchmarks.shared_memory", transport, folder]
        ranks = [
            subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for rank in (0, 1)
        ]
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [float(word) for word in said[0].split()]


def _rank(transport: str, folder: Path, rank: int) -> None:
    link = _gloo(folder, rank) if transport == "gloo" else _segment(folder, rank)
    if link is None:
        return
    for size in SIZES:
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            link(size)  # there and back
            seconds.append((time.perf_counter() - started) / 2)
        if rank == 0:
            print(size / min(seconds) / 1e9, flush=True)


def _gloo(folder: Path, rank: int) -> Callable[[int], None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tensor = torch.ones(max(SIZES), dtype=torch.uint8)

    def both_ways(size: int) -> None:
        for sender in (0, 1):
            (dist.send if rank == sender else dist.recv)(tensor[:size], 1 - rank)

    return both_ways


def _segment(folder: Path, rank: int) -> Callable[[int], None] | None:
    """Through a segment of two halves; one byte over a socket says that a half is written, or read."""
    path, file = str(folder / "socket"), Path("/dev/shm", f"benchmark-{folder.name}")
    if rank == 0:
        file.write_bytes(bytes(_SEGMENT))
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen()
        peer, _ = listening.accept()
        there = peer.recv(1) == b"y"
        segment = _mapped(file)
        file.unlink()
    else:
        peer = _connected(path)
        there = file.exists()
        segment = _mapped(file) if there else memoryview(b"")
        peer.sendall(b"y" if there else b"n")
    if not there:
        return None
    shared, own = segment, memoryview(bytearray(max(SIZES)))
    half = _SEGMENT // 2

    def move(size: int, *, sends: bool) -> None:
        for number, start in enumerate(range(0, size, half)):
            place, end = number % 2 * half, min(start + half, size)
            if sends:
                if number > 1:
                    peer.recv(1)
                shared[place : place + end - start] = own[start:end]
                peer.sendall(b".")
            else:
                peer.recv(1)
                own[start:end] = shared[place : place + end - start]
                peer.sendall(b".")
        if sends:
            for _ in range(min(2, -(-size // half))):
                peer.recv(1)

    def both_ways(size: int) -> None:
        move(size, sends=rank == 0)
        move(size, sends=rank == 1)

    return both_ways


def _mapped(file: Path) -> memoryview:
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), _SEGMENT))


def _connected(path: str) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(path)
            return peer
        except OSError:
            peer.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        _rank(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
