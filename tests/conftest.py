"""What holds for all tests."""

import os

# Tests run beside each other, and torch's threads spin while they wait: two on one core cost twice the time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
