"""Changes that a test must notice: `python -m tests.mutants` makes each in a copy of the tree and runs its test."""
