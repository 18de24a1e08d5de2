"""Free accelerators of nodes, and whether a worker fits a node."""
