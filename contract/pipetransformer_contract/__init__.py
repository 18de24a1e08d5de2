"""What operator, trainer and client share: messages, the API of jobs, and the choice of a layout."""
