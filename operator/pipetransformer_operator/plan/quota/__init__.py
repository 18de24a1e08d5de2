"""Quota of a job that names a queue: what the queue granted, and when the job asks for more."""
