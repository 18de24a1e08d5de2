"""Generations of workers: how they meet, how state moves from one layout to the next, and how a death is noticed."""
