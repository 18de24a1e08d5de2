"""The prefix of all metrics, and the labels of a job's metrics.

Prometheus itself uses the label `job` for a group of targets, so the name of a training job is in `job_name`.
"""

PREFIX = "pipetransformer"
JOB_LABELS = ("namespace", "job_name")
