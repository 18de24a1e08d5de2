"""The committed state: layout, control state, worker state, optimizer."""
