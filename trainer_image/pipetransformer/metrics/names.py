"""How a worker's metrics are called. Which job and worker it is, the one who scrapes knows: the pod's labels say it."""

PREFIX = "pipetransformer_trainer"
