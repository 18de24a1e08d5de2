"""Processes that read samples ahead of the round that trains them, where reading is slow.

They start before a worker is in anybody's pause and end with it. They know nothing of layouts: what they read is a
sample at a step, which is the same whoever reads it, so after a regroup, or when a step is done again, what is there
is taken by sample and the rest is dropped. What they have read comes through pipes: pods have little of /dev/shm.

A `ProcessPoolExecutor` waits for ever for the rest of a result when the kernel kills a process that is sending it;
here every process has a pipe of its own, whose end tells. torch's `DataLoader` reads in an order that is fixed
beforehand, and uses /dev/shm.
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
#: Of a round's samples, for each process: samples may take unlike times.
_PIECES = 4
#: A process that ends is replaced; what also ends its successor, more would not read.
_ATTEMPTS = 2

#: A step, None for a sample that is read as it is, and a sample's id.
Wanted = tuple[int | None, int]
#: Inputs and targets of some samples.
_Samples = tuple[Tensor, Tensor]
#: What a sample is read with, and its row there.
_Place = tuple[Future[_Samples], int]


class Readers:
    """What reads the samples of one worker; a context in which its processes run."""

    def __init__(self, dataset: Dataset, processes: int) -> None:
        """
        Raises:
            SpecError: the dataset cannot be sent to processes.
        """
        try:
            content = pickle.dumps({"train": dataset.train, "test": dataset.test})
        except Exception as error:
            message = f"the dataset cannot be sent to processes that read it: {type(error).__name__}: {error}"
            raise SpecError(_FIELD, f"{message}: make it one that can be pickled, or set this to 0") from error
        self._readers = [_Reader(content) for _ in range(processes)]
        self._idle: SimpleQueue[_Reader] = SimpleQueue()
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="readers")
        self._closed = False
        #: By split, and whether samples are read for a step.
        self._ahead: dict[tuple[str, bool], dict[Wanted, _Place]] = defaultdict(dict)

    @classmethod
    def of(cls, dataset: Dataset, processes: int) -> "Readers | None":
        """None where none are asked for, or samples are rows of tensors.

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
                f"a process that reads samples ended while it started, see its own words in the log ({error!r}): a "
                "script does its work under `if __name__ == '__main__':`, since such processes import it",
            ) from error
        except BaseException:
            self.close()
            raise
        for reader in self._readers:
            self._idle.put(reader)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, in whatever they are."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for reader in self._readers:
            reader.kill()
        self._threads.shutdown()
        for reader in self._readers:
            reader.end()

    def read(self, split: str, ids: Sequence[int], step: int | None, following: Iterable[Wanted] = ()) -> _Samples:
        """What `read_batch` gives; then, while nobody waits, `following` are read, and nothing else that was begun.

        Args:
            split: `train` or `test`.
            ids: of the samples.
            step: at which training sees them, None to read them as they are.
            following: what will be asked for next; nothing to leave what was begun as it is.

        Raises:
            SpecError: they cannot be read, or a process ended twice as it read them.
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
        """Where each sample is read, those by other calls included."""
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
        reader = self._idle.get()  # there are as many as threads
        try:
            for _ in range(_ATTEMPTS):
                try:
                    return reader.read(split, ids, step)
                except (EOFError, OSError) as error:
                    how, last = reader.end(), error
                    if self._closed:
                        raise
                    logger.warning("a process that reads samples has ended (%s), and is replaced", how)
        finally:
            self._idle.put(reader)
        raise SpecError(
            "spec.data",
            f"the processes that read the samples {', '.join(map(str, ids))} have ended, one after the other ({how}): "
            "they may lack memory, or a library that reads these samples fails",
            reason="DataUnreadable",
        ) from last


class _Reader:
    """A process, and the one that takes its place when it has ended."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._killed = False

    def start(self) -> Connection:
        """Start it, and have it load the dataset.

        Raises:
            EOFError, ConnectionError: it ended.
            OSError: it cannot start here.
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
        """Inputs and targets, on the CPU; starts the process where it does not run.

        Raises:
            EOFError, OSError: it ended, or cannot start.
            SpecError: the samples cannot be read, or it cannot load the dataset.
        """
        pipe = self.start() if self._pipe is None else self._pipe
        pipe.send((split, ids, step))
        inputs, targets = (torch.from_numpy(content).view(dtype) for content, dtype in self._answer(pipe))
        return inputs, targets

    def kill(self) -> None:
        self._killed = True
        process = self._process  # which a thread may be about to replace
        if process is not None:
            process.kill()

    def end(self) -> str:
        """Let go of it; how it ended."""
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
    """Whether this is a process that is starting, in which a program's main module is only imported."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def _serve(pipe: Connection) -> None:
    """What a process does: it loads the dataset, and reads what it is asked for as long as its parent lives."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the parent
    torch.set_num_threads(1)
    # Else all draw alike, as the server that they are forked from would.
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
        message = f"a process that reads samples cannot load the dataset: {type(error).__name__}: {error}"
        pipe.send(SpecError(_FIELD, message))
        raise
    pipe.send(None)
    return splits


def _bytes(tensor: Tensor) -> tuple[NDArray[Any], torch.dtype]:
    """What is sent of a tensor: torch sends its own through /dev/shm."""
    return tensor.contiguous().view(torch.uint8).numpy(), tensor.dtype


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
