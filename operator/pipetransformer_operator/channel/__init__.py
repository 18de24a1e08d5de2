"""The channel: HTTP(S) under `/v1` by which workers say what they know and learn which generation they belong to."""
