"""The benchmarks' own code, on tiny cases."""
