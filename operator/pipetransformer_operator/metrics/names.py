"""How metrics are called: one prefix, and the labels of what belongs to a job.

`job` is what Prometheus itself calls a target's group, so a training job's name is `job_name`.
"""

PREFIX = "pipetransformer"
JOB_LABELS = ("namespace", "job_name")
