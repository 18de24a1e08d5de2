"""A fake cluster, the command line and records, for tests of the client."""
