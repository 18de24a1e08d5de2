"""A real cluster: its objects, its tools, and a user's terminal."""
