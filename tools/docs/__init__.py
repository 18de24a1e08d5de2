"""Generates parts of the documentation: references, benchmarks and pictures. Also holds the site's hooks."""
