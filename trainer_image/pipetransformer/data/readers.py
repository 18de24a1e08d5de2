"""Processes that read samples ahead of the round that trains them.

They live as long as the worker, and do not depend on the layout, so samples that were read stay useful after a regroup.
Results come through pipes. torch's `DataLoader` would use /dev/shm, and pods have little of it. Each process has its
own pipe, so its death is noticed at once. With a `ProcessPoolExecutor` the worker would wait without end if the kernel
killed a process that is sending a result.
"""

import contextlib
import gc
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
from .digest import byte_tensor
from .tokens import PaddedTokens

logger = logging.getLogger(__name__)

_FIELD = "spec.data.loaderProcesses"
#: Each round's samples are read in this many pieces per process. With several pieces, slow samples delay a round less.
_PIECES = 4
#: How many processes try to read a piece: if the first one dies, a second one tries.
_ATTEMPTS = 2

#: A sample to read: the global step whose variant is wanted (None to read without augmentation), and the sample id.
Wanted = tuple[int | None, int]
#: Inputs and targets of some samples.
_Samples = tuple[Tensor, Tensor]
#: Where a sample will be: the result of a piece, which is read in one call, and the sample's row in it.
_Place = tuple[Future[_Samples], int]


class Readers:
    """Reads the samples of one worker in several processes. The processes run inside the context of this object."""

    def __init__(self, dataset: Dataset, processes: int) -> None:
        """
        Args:
            dataset: the samples.
            processes: number of processes, at least 1.

        Raises:
            SpecError: the dataset cannot be pickled, so it cannot be sent to processes.
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
        #: Samples that are being read ahead, by split and by whether they are read without augmentation.
        self._ahead: dict[tuple[str, bool], dict[Wanted, _Place]] = defaultdict(dict)

    @classmethod
    def of(cls, dataset: Dataset, processes: int) -> "Readers | None":
        """Make the readers; None if `processes` is 0, or if the samples are in memory already.

        Raises:
            SpecError: the dataset cannot be pickled, so it cannot be sent to processes.
        """
        in_memory = isinstance(dataset.train, TensorSplit | PaddedTokens)
        return None if not processes or in_memory else cls(dataset, processes)

    def __enter__(self) -> None:
        """Start all processes at the same time.

        Raises:
            SpecError: a process ended while it started, or cannot load the dataset.
            OSError: processes cannot be started on this machine.
        """
        try:
            for _ in self._threads.map(_Reader.start, self._readers):
                pass
        except (EOFError, ConnectionError) as error:
            self.close()
            raise SpecError(
                _FIELD,
                f"a loader process ended while it started ({error!r}); its output in the log says why. Loader processes"
                " import the script: put its code, except definitions, under `if __name__ == '__main__':`",
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
        """Return inputs and targets as `read_batch` does, and begin to read the samples that are needed next.

        Args:
            split: `train` or `test`.
            ids: sample ids.
            step: global step (from 0) whose variants are read; None to read without augmentation.
            following: the samples that will be needed next. Reading of all others that has begun is cancelled. If
                empty, nothing is begun or cancelled.

        Raises:
            SpecError: the samples cannot be read, or two processes died while they read them.
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
        """Begin to read the samples that `begun` does not contain. Returns the places of all wanted samples."""
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
        reader = self._idle.get()  # does not wait, because there are as many readers as threads
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
    """A loader process. `read` starts it again if it has died."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._killed = False

    def start(self) -> Connection:
        """Start the process, and wait until it has loaded the dataset. Returns the pipe to it.

        Raises:
            EOFError, ConnectionError: the process ended.
            OSError: the process cannot be started.
            SpecError: the process cannot load the dataset.
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
        """Read inputs and targets, on the CPU. Starts the process if it does not run.

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
        """Kill the process if it still runs. Returns how it ended, in words. The next `read` starts another process."""
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
    """Whether this is a process of `multiprocessing` that is starting, and imports the program's main module for it."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def _serve(pipe: Connection) -> None:
    """The main function of a loader process: load the dataset, then read samples on request until the parent ends."""
    gc.freeze()  # otherwise a collection visits all imported modules, and copies 40 MB that processes share
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the parent handles it
    torch.set_num_threads(1)
    # Otherwise all processes would draw the same random numbers, because they are copies of the fork server.
    torch.seed()
    np.random.seed()
    with contextlib.suppress(EOFError, OSError):  # raised when the parent has ended
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
    """A tensor as bytes and a type, to send it through the pipe. torch would send a tensor through /dev/shm."""
    *outer, last = tensor.shape
    return byte_tensor(tensor).view(*outer, last * tensor.itemsize).numpy(), tensor.dtype


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
