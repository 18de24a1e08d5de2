"""Elastic pipeline training: layers freeze, pipelines shrink, and freed workers train on or go back to the cluster."""
