"""The job: facts that every worker derives from the spec, and the checks before a worker is ready."""
