"""What holds for all tests."""

import gc
import os

from hypothesis import Phase, settings

# Tests run beside each other, and torch's threads spin while they wait: two on one core cost twice the time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What tests serve and ask for on loopback is not behind the environment's proxy.
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))
# torch looks up the name of each address that it connects to. If the name server is silent, that takes 10 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A machine that is busy with other work makes any example slow. pytest's timeout ends a test that hangs.
settings.register_profile("tests", deadline=None)
#: A failure is all that mutants need: to make an example small takes up to five minutes.
settings.register_profile("mutants", deadline=None, phases=set(Phase) - {Phase.shrink, Phase.explain})
settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """A collection of garbage no longer visits what was imported: it took a tenth of the time of many tests."""
    gc.collect()
    gc.freeze()
