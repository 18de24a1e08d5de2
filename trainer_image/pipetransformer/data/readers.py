"""Processes that read samples ahead of the round that trains them.

They live as long as the worker. They do not know layouts: they read a sample at a step, so what they have read stays
useful after a regroup. Results come through pipes, because pods have little /dev/shm; torch's `DataLoader` uses it.
Each process has its own pipe, so the death of a process is noticed at once. A `ProcessPoolExecutor` would wait without
end for the rest of a result if the kernel killed the process that sends it.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from operator import itemgetter
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipetransformer.errors import SpecError

from .dataset import Dataset, TensorSplit, read_batch
from .tokens import PaddedTokens

logger = logging.getLogger(__name__)

_FIELD = "spec.data.loaderProcesses"
#: Pieces of a round's samples for each process, because samples take different times to read.
_PIECES = 4
#: Processes that try to read a piece: one that dies is replaced once.
_ATTEMPTS = 2

#: A step (None to read without augmentation) and a sample id.
Wanted = tuple[int | None, int]
#: Inputs and targets of some samples.
_Samples = tuple[Tensor, Tensor]
#: The piece that a sample is read with, and the sample's row in it.
_Place = tuple[Future[_Samples], int]


class Readers:
    """Reads the samples of one worker. As a context manager it runs the processes."""

    def __init__(self, dataset: Dataset, processes: int) -> None:
        """
        Raises:
            SpecError: the dataset cannot be sent to processes.
        """
        try:
            content = pickle.dumps({"train": dataset.train, "test": dataset.test})
        except Exception as error:
            message = f"the dataset cannot be sent to loader processes: {type(error).__name__}: {error}"
            raise SpecError(_FIELD, f"{message}: make the dataset picklable, or set this field to 0") from error
        self._readers = [_Reader(content) for _ in range(processes)]
        self._idle: SimpleQueue[_Reader] = SimpleQueue()
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="readers")
        self._closed = False
        #: By split, and by whether samples are read without augmentation.
        self._ahead: dict[tuple[str, bool], dict[Wanted, _Place]] = defaultdict(dict)

    @classmethod
    def of(cls, dataset: Dataset, processes: int) -> "Readers | None":
        """The readers, or None if `processes` is 0 or the samples are in memory.

        Raises:
            SpecError: the dataset cannot be sent to processes.
        """
        in_memory = isinstance(dataset.train, TensorSplit | PaddedTokens)
        return None if not processes or in_memory else cls(dataset, processes)

    def __enter__(self) -> None:
        """Start the processes, side by side.

        Raises:
            SpecError: one ended as it started, or cannot load the dataset.
            OSError: they cannot start here.
        """
        try:
            for _ in self._threads.map(_Reader.start, self._readers):
                pass
        except (EOFError, ConnectionError) as error:
            self.close()
            raise SpecError(
                _FIELD,
                f"a loader process ended while it started ({error!r}); its log says why. Loader processes import the "
                "script: do its work under `if __name__ == '__main__':`",
            ) from error
        except BaseException:
            self.close()
            raise
        for reader in self._readers:
            self._idle.put(reader)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for reader in self._readers:
            reader.kill()
        self._threads.shutdown()
        for reader in self._readers:
            reader.end()

    def read(self, split: str, ids: Sequence[int], step: int | None, following: Iterable[Wanted] = ()) -> _Samples:
        """As `read_batch`. Then begin to read `following`, and cancel other reads that were begun.

        Args:
            split: `train` or `test`.
            ids: sample ids.
            step: the step at which training sees them; None to read without augmentation.
            following: the samples that will be needed next; empty to keep the reads that were begun.

        Raises:
            SpecError: the samples cannot be read, or two processes died reading them.
        """
        begun = self._ahead[split, step is None]
        now = self._begin(split, ((step, sample) for sample in ids), begun)
        for wanted in now:
            begun.pop(wanted, None)
        if following := list(following):
            kept = self._begin(split, following, begun | now)
            in_use = {piece for piece, _ in (now | kept).values()}
            for piece in {piece for piece, _ in begun.values()} - in_use:
                piece.cancel()
            self._ahead[split, step is None] = kept
        pieces = {piece: piece.result() for piece in dict.fromkeys(piece for piece, _ in now.values())}
        places = [now[step, sample] for sample in ids]
        inputs, targets = (torch.stack([pieces[piece][part][row] for piece, row in places]) for part in (0, 1))
        return inputs, targets

    def _begin(self, split: str, wanted: Iterable[Wanted], begun: Mapping[Wanted, _Place]) -> dict[Wanted, _Place]:
        """The place of each sample, including places that earlier calls began."""
        places = {each: begun.get(each) for each in wanted}
        missing = [each for each, place in places.items() if place is None]
        found = {each: place for each, place in places.items() if place is not None}
        for step, of_step in groupby(missing, itemgetter(0)):
            ids = [sample for _, sample in of_step]
            size = -(-len(ids) // (_PIECES * len(self._readers)))
            for start in range(0, len(ids), size):
                some = ids[start : start + size]
                piece = self._threads.submit(self._piece, split, some, step)
                found |= {(step, sample): (piece, row) for row, sample in enumerate(some)}
        return found

    def _piece(self, split: str, ids: list[int], step: int | None) -> _Samples:
        reader = self._idle.get()  # there is one for each thread
        try:
            for _ in range(_ATTEMPTS):
                try:
                    return reader.read(split, ids, step)
                except (EOFError, OSError) as error:
                    how, last = reader.end(), error
                    if self._closed:
                        raise
                    logger.warning("a loader process died (%s); replacing it", how)
        finally:
            self._idle.put(reader)
        raise SpecError(
            "spec.data",
            f"two loader processes died reading the samples {', '.join(map(str, ids))} ({how}): "
            "they may lack memory, or a library crashes on these samples",
            reason="DataUnreadable",
        ) from last


class _Reader:
    """A loader process, which is started again after it died."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._killed = False

    def start(self) -> Connection:
        """Start the process and let it load the dataset.

        Raises:
            EOFError, ConnectionError: the process ended.
            OSError: it cannot be started.
            SpecError: it cannot load the dataset.
        """
        context = multiprocessing.get_context("forkserver")  # the parent has threads, and maybe an accelerator
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), name="reader", daemon=True)
        process.start()
        self._process = process  # from here on it can be killed
        theirs.close()
        if self._killed:
            process.kill()
        self._pipe.send_bytes(self._content)
        self._answer(self._pipe)
        return self._pipe

    def read(self, split: str, ids: list[int], step: int | None) -> _Samples:
        """Inputs and targets, on the CPU. Starts the process if it does not run.

        Raises:
            EOFError, OSError: the process ended, or cannot be started.
            SpecError: the samples cannot be read, or the process cannot load the dataset.
        """
        pipe = self.start() if self._pipe is None else self._pipe
        pipe.send((split, ids, step))
        inputs, targets = (torch.from_numpy(content).view(dtype) for content, dtype in self._answer(pipe))
        return inputs, targets

    def kill(self) -> None:
        self._killed = True
        process = self._process  # another thread may replace it meanwhile
        if process is not None:
            process.kill()

    def end(self) -> str:
        """Kill the process and forget it. Returns how it ended."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is None or process.pid is None:
            return "it did not start"
        process.kill()
        process.join()
        return f"exit code {process.exitcode}"

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        answer = pipe.recv()
        if isinstance(answer, SpecError):
            raise answer
        return answer


def importing_main() -> bool:
    """Whether this process is just starting and imports the program's main module."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def _serve(pipe: Connection) -> None:
    """The main function of a loader process: load the dataset, then read requested samples while the parent lives."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the parent
    torch.set_num_threads(1)
    # Otherwise all processes would draw the same numbers, as copies of the fork server.
    torch.seed()
    np.random.seed()
    with contextlib.suppress(EOFError, OSError):  # the parent ends
        splits = _loaded(pipe)
        while True:
            split, ids, step = pipe.recv()
            try:
                pipe.send([_bytes(part) for part in read_batch(splits[split], ids, step)])
            except SpecError as error:
                error.add_note(traceback.format_exc())
                pipe.send(error)


def _loaded(pipe: Connection) -> dict[str, Any]:
    try:
        splits: dict[str, Any] = pickle.loads(pipe.recv_bytes())
    except Exception as error:
        message = f"a loader process cannot load the dataset: {type(error).__name__}: {error}"
        pipe.send(SpecError(_FIELD, message))
        raise
    pipe.send(None)
    return splits


def _bytes(tensor: Tensor) -> tuple[NDArray[Any], torch.dtype]:
    """A tensor's bytes and type, because torch would send the tensor through /dev/shm."""
    return tensor.contiguous().view(torch.uint8).numpy(), tensor.dtype


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
