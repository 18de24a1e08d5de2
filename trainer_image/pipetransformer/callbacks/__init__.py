"""What the leader tells to the user's code."""
