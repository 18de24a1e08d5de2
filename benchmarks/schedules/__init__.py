"""Schedules on virtual devices, against what one would run without them: `make bench-schedules`."""
