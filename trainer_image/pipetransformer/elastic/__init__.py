"""How a job moves from one layout to the next: workers meet, state moves between them, and lost workers are noticed."""
