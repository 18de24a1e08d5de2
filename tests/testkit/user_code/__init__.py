"""Models, data and metrics as a user would write them, the broken ones too."""
