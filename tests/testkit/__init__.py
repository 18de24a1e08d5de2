"""What tests and benchmarks share: builders, simulated and scripted peers, checkers. It imports no test."""

from pathlib import Path

#: The repository's root.
ROOT = Path(__file__).parents[2]
