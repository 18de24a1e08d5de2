"""The channel: HTTP(S) under `/v1` by which workers report and learn which generation they belong to."""
