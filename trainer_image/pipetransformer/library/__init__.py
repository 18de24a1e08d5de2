"""The library that scripts use: `train()`, runs without an operator, forecasts and predictions."""
