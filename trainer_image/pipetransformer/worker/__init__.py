"""A worker's process from its environment to its exit code, and the trainer that lives in it."""
