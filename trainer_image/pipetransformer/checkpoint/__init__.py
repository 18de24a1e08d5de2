"""Durable state between two rounds: when a checkpoint is written, who writes it, and what a resume takes from it."""
