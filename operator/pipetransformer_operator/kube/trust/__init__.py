"""Certificates and tokens of the channel."""
