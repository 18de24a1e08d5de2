"""Elastic pipeline training: layers freeze, pipelines shrink, and what they free trains on or goes back to the cluster."""
