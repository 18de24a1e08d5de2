"""The operator: turns `PipeTrainingJob` objects into workers, and frozen layers into other layouts."""
