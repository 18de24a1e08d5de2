"""What every worker derives alike from the spec, and what is refused before a worker is ready."""
