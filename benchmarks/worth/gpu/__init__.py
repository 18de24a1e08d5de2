"""What one GPU costs: `python3 -m benchmarks.worth.gpu --out DIR` writes `calibration.json`. It needs torch alone."""
