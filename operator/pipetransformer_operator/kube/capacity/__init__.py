"""What nodes have to give: accelerators that are free, and whether a worker fits a node."""
