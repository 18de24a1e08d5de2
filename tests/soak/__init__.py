"""Random faults over several jobs of real trainers, behind a real control plane and the real operator."""
