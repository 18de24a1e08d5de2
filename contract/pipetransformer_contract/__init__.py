"""What operator and trainer say to each other, the trainer's part of the spec, and the pure choice of a layout."""
