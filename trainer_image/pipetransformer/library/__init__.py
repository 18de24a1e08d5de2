"""The functions that scripts call: `train()`, also without an operator, forecasts for `plan`, and `load_model()`."""
