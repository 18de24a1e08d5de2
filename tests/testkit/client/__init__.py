"""A cluster that the client talks to."""
