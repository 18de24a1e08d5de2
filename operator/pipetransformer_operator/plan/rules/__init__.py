"""The rules for one job, one in each file. Each rule reads the draft of the job's plan, and changes it."""
