"""Checkpoints: when they are written, how, and what a resume takes from them."""
