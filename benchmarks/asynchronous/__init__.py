"""Asynchronous schedules: how much faster a step is, and what it costs in loss and accuracy: `make bench-async`."""
