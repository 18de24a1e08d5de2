"""Messages between operator and trainer, the job's API, and the choice of a layout."""
