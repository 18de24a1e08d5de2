"""Objects of the API server as they change."""
