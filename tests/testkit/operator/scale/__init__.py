"""A thousand jobs behind the real control plane: fake nodes, workers that only speak, and the real operator."""
