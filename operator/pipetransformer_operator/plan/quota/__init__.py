"""Quota of a job that names a queue: its requests, what the queue granted, and how much of that the job may use."""
