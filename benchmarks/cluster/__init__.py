"""Many jobs on one cluster, in simulated time: what each way to run them costs in GPU-hours and in waiting.

`trace` draws jobs, `scaling` says how quick they are in each layout, `engine` lets time pass. A policy decides: the
operator's own `plan()` (`by_plan`), its parts `choose()` and `allocate()` alone (`by_parts`), or a rival (`rivals`).
"""
