"""Random draws keyed by seed, step, sample and layer, so that no loss depends on the layout."""
