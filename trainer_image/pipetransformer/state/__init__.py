"""The committed state of a job: who holds what, the control state, each worker's units and their optimizer state."""
