"""Quota of jobs that name a queue: what the queue granted, and when a job asks for more or returns some."""
