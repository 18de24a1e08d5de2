"""The rules of one job, one a file: each reads the draft and says what it changes."""
