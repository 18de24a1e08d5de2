"""Several jobs on one cluster: shares, claims, and room for pods of other owners."""
