"""Seeds the random generators that a user's code may draw from while it builds a model."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

#: Held while a model is built. Random generators, and the default type that transformers changes, belong to the whole
#: process, and a thread of a broken generation or an earlier run may still be building.
one_at_a_time = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which torch, numpy and Python draw from `seed`. Afterwards their states are as before. Only one
    thread at a time can be inside."""
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
