"""The controller: one loop a job that observes, plans and applies; on a cluster and for local processes alike."""
