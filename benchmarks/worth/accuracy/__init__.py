"""Does freezing keep accuracy, and is it better than training for fewer epochs?

Fine-tuning by the product's own `train`, on tasks at a growing distance from the pretraining. Each policy meets its
rivals at equal work: fewer steps with nothing frozen, and training only the top layers from the start.
"""
