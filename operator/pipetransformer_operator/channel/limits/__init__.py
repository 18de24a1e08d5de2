"""What the channel allows one sender, one address and all together."""
