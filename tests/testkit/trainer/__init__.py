"""Runs of the trainer in processes of this machine, and what checks them."""
