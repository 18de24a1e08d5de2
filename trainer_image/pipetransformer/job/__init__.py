"""The job: facts that every worker derives from the spec, and checks that refuse a job before it trains."""
