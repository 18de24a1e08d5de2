"""Quota through Kueue: each request of a job is one Workload. Only jobs that name a queue come here, and only where the
operator was told to use Kueue."""
