"""The contract between operator and trainer: wire types, the trainer's part of the spec, and the pure choice of a layout."""
