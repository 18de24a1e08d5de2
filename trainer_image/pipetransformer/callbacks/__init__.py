"""Callbacks: methods of the user's code that the leader calls."""
