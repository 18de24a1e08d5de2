"""Runs a job without a cluster: the same controller and channel, one job in memory, and workers as processes."""
