"""Whole runs on virtual devices: ours, its parts, and what a user would pick instead."""
