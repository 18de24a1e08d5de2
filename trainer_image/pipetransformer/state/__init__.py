"""The committed state of a job: roles of workers, the control state, each worker's units and their optimizer state."""
