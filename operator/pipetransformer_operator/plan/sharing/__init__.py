"""Several jobs on one cluster: their shares, which of them starts first, and room for pods of other owners."""
