"""Quota through Kueue: each request of a job is one Workload. For jobs that name a queue, where Kueue is enabled."""
