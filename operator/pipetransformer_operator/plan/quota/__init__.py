"""Quota of a job that names a queue: what it was granted, and when it asks for more."""
