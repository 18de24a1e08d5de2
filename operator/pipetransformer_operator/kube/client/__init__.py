"""Requests to the API server, and the Lease that makes one operator the writer."""
