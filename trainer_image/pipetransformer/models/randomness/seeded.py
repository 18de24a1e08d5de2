"""Seeds the random generators while a user's code builds a model."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

#: Held while a model is built. Random generators belong to the whole process, as does the default type, which
#: transformers changes. A thread of a broken generation or of an earlier run may still be building a model.
one_at_a_time = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which the generators of torch, numpy and Python start from `seed`. On exit it restores their states.
    Only one thread at a time can be inside."""
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
