"""The random generators that code of the user's may draw from while it builds a model."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

#: Held by who makes a model: the generators, and the default type that transformers changes meanwhile, are the
#: process's, and what a broken generation, or an earlier run, has left undone may still be at it in a thread.
one_at_a_time = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """In here torch, numpy and Python draw what `seed` says, on every worker; afterwards they go on as before. Of
    several threads one is in here."""
    with one_at_a_time, torch.random.fork_rng(devices=[]):
        of_python, of_numpy = random.getstate(), np.random.get_state()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
