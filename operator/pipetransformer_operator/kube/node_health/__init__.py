"""Which nodes have a problem, and what marks them."""
