"""Runs a job without a cluster: the same controller and channel, its one job in memory, its workers as processes."""
