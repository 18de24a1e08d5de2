"""What is committed: layout, control state, worker state, optimizer."""
