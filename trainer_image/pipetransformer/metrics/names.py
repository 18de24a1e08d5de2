"""The prefix of a worker's metrics. Prometheus adds job and worker from the pod's labels."""

PREFIX = "pipetransformer_trainer"
