"""One round of training, from dealt micro-batches to committed state, and what follows it."""
