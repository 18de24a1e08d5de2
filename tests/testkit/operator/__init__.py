"""Jobs, clusters and trainers as the operator meets them: built, simulated or scripted."""
