"""What a whole run saves, against what its user would pick instead."""
