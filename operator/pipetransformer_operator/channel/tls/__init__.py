"""Certificates of the channel and its TLS connections."""
